from interclr.screen import Screen, TrainingBar

__all__ = ["Screen", "TrainingBar"]
