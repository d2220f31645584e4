"""``python -m interclr`` is the command line."""

from interclr.cli import main

if __name__ == "__main__":
    main()
