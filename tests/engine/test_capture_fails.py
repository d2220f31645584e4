"""What happens where a step cannot be captured: the parts of it that need no GPU."""

from __future__ import annotations

import torch
from small_learner import images_of, learner, pixels, plan, train_step

from interclr.engine.capture import CaptureFailed
from interclr.engine.step import TrainStep


def test_a_step_that_cannot_be_captured_is_made_in_the_ordinary_way() -> None:
    """To the bit as if nobody had tried, in this step and all that follow; and it is said once."""
    data, states = pixels(), []
    for tries in (False, True):
        model = learner("mocov2", {}, norm="batch")
        step = train_step(model, plan(4))
        said: list[str] = []
        step.warn = said.append
        for number in range(4):
            if tries and number == 2:
                _pretend_to_capture(step)
            step(images_of(number, 16, data), number)
        assert len(said) == tries
        assert all("sync in the model" in line for line in said)
        states.append(model.state_dict())
    for key, value in states[0].items():
        assert torch.equal(value, states[1][key]), key


def _pretend_to_capture(step: TrainStep) -> None:
    def fails(compute: object, batch: object) -> dict[str, torch.Tensor]:
        for parameter in step.learner.parameters():  # what a capture that ended in the backward leaves behind
            parameter.grad = torch.full_like(parameter, 7.0)
        raise CaptureFailed("sync in the model")

    step.captures = True
    step.captured = {True: fails, False: fails}  # type: ignore[dict-item]
