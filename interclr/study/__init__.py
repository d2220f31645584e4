"""The paper's empirical study, and anybody's own: lists of overrides over a recipe, run, tabulated and drawn."""

from interclr.study.runner import run_study
from interclr.study.schema import Study, open_studies, parse_seeds, study_names

__all__ = ["Study", "open_studies", "parse_seeds", "run_study", "study_names"]
