"""What ranking a sample of the bank (``candidates``) changes in semi-hard draws, beside ranking all of it.

    python benchmarks/candidates.py [--size 200000] [--steps 24] [--out results/speed/candidates.json]

On a CPU, with made-up clustered features. Exact and sampled draws of a step share anchors, positives and the priority,
so their difference is due to the sample alone. As a yardstick a second exact draw has a priority of its own: its
difference is what chance does in any step.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interclr.bank import MemoryBank
from interclr.bench.setup import clustered_features
from interclr.labels.kmeans import kmeans
from interclr.losses import cosines, margin_nce
from interclr.run.folder import environment
from interclr.samplers import SemiHard
from interclr.screen import Screen
from interclr.types import Pairs

DIM, ANCHORS, FRACTION = 128, 64, 0.1
NEGATIVES, TEMPERATURE, MARGIN = 2048, 0.2, -0.5  # fewer negatives in a bank of less than 200,000


def made_up_bank(size: int, clusters: int) -> MemoryBank:
    bank = MemoryBank(size, DIM, clusters)
    bank.features.copy_(clustered_features(size, DIM, torch.device("cpu")))
    bank.labels.copy_(kmeans(bank.features, clusters, 4, torch.Generator().manual_seed(0)).labels)
    bank.rebuild()
    return bank


def ranks_in_others(query: Tensor, label: Tensor, bank: MemoryBank) -> Tensor:
    """(A, N) place of each image among Sⁿ, 0 the nearest; the anchor's own cluster comes after all of them."""
    score = (query @ bank.features.T).masked_fill_(bank.labels == label[:, None], -torch.inf)
    return score.argsort(1, descending=True).argsort(1)


def pool_shares(rank: Tensor, others: Tensor, sampler: SemiHard, priority: Tensor) -> Tensor:
    """(A,) the part of Sⁿ that is at least as near as the last member of each anchor's pool."""
    sample = rank[:, priority[: sampler.candidates or len(priority)]].sort(1).values  # own cluster last
    last = torch.tensor([sampler.pool_size(int(found)) - 1 for found in (sample < others[:, None]).sum(1)])
    return (sample.gather(1, last[:, None]).squeeze(1) + 1) / others


def look(pairs: Pairs, query: Tensor, rank: Tensor, others: Tensor, bank: MemoryBank) -> dict[str, Any]:
    """Of one step's draw: what lies outside the exact pool and how far, mean cosine, loss."""
    near, far = cosines(query, bank.features, pairs)
    exists = pairs.negative >= 0
    place = rank.gather(1, pairs.negative.clamp_min(0)) + 1  # 1 is the nearest
    border = torch.tensor([SemiHard(1, FRACTION).pool_size(int(count)) for count in others])[:, None]
    outside = exists & (place > border)
    return {
        "missing": float((~exists).float().mean()),
        "outside": float(outside.sum() / exists.sum()),
        "excess": (place / border - 1)[outside].tolist(),
        "cosine": float(far[exists].mean()),
        "loss": float(margin_nce(near, far, TEMPERATURE, MARGIN)),
    }


def paired(looks: list[dict[str, Any]], exact: list[dict[str, Any]], key: str) -> dict[str, float]:
    """The mean over steps, and the difference to the exact draws with its standard error."""
    change = [a[key] - b[key] for a, b in zip(looks, exact, strict=True)]
    mean, error = statistics.fmean(look[key] for look in looks), statistics.stdev(change) / math.sqrt(len(change))
    return {"mean": mean, "difference": statistics.fmean(change), "standard_error": error}


def summary(count: int, size: int, looks: list[Any], exact: list[Any], shares: Tensor) -> dict[str, Any]:
    """Of one way to draw; ``shares`` are (steps, A)."""
    predicted = math.sqrt(FRACTION * (1 - FRACTION) / count) if count < size else 0.0
    excess = [value for look in looks for value in look["excess"]]
    return {
        "candidates": count,
        "missing_share": statistics.fmean(look["missing"] for look in looks),
        "outside_share": statistics.fmean(look["outside"] for look in looks),
        "outside_median_excess_rank": statistics.median(excess) if excess else 0.0,
        "pool_share_mean": float(shares.mean()),
        "pool_share_sd": float(shares.std()),
        "pool_share_sd_of_step_means": float(shares.mean(1).std()),
        "predicted_sd": predicted,
        "predicted_sd_without_replacement": predicted * math.sqrt(1 - count / size),
        "cosine": paired(looks, exact, "cosine"),
        "loss": paired(looks, exact, "loss"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=200_000)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("results/speed/candidates.json"))
    given = parser.parse_args()
    size, steps, screen = given.size, given.steps, Screen()
    if size < 5_000 or steps < 2:
        parser.error("use 5,000 images and 2 steps at least")
    count, clusters = min(NEGATIVES, size // 96), size // 100
    least = math.ceil(1.05 * count / FRACTION)
    samplers = {"exact": SemiHard(count, FRACTION), "exact again": SemiHard(count, FRACTION)}
    samplers |= {f"{times} × {least:,}": SemiHard(count, FRACTION, candidates=times * least) for times in (1, 2, 4)}
    screen.say(f"k-means of {size:,} unit vectors, {clusters:,} clusters ...")
    bank, generator = made_up_bank(size, clusters), torch.Generator().manual_seed(1)
    looks: dict[str, list[Any]] = {name: [] for name in samplers}
    shares: dict[str, list[Tensor]] = {name: [] for name in samplers}
    with screen.working("steps") as progress:
        for step in range(steps):
            index = torch.randperm(size, generator=generator)[:ANCHORS]
            query, label = bank.features[index], bank.labels[index]
            others, rank = size - bank.counts[label], ranks_in_others(query, label, bank)
            lots = torch.randint(2**62, (ANCHORS,), generator=generator)
            first, second = (torch.randperm(size, generator=generator) for _ in range(2))
            for name, sampler in samplers.items():
                priority = second if name == "exact again" else first
                pairs = sampler.select(query, index, bank, priority, lots)
                looks[name].append(look(pairs, query, rank, others, bank))
                shares[name].append(pool_shares(rank, others, sampler, priority))
            progress(step + 1, steps)
    rows = {
        name: summary(sampler.candidates or size, size, looks[name], looks["exact"], torch.stack(shares[name]))
        for name, sampler in samplers.items()
    }
    sizes = {"size": size, "dim": DIM, "clusters": clusters, "largest_cluster": int(bank.counts.max()), "steps": steps}
    method = {"negatives": count, "pool_fraction": FRACTION, "temperature": TEMPERATURE, "margin": MARGIN}
    record: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), **environment()}
    record |= {"settings": {**sizes, "anchors": ANCHORS, **method}, "draws": rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(record, indent=1) + "\n")
    header = ("draw", "outside", "by", "sd of share", "predicted", "Δ cosine ± s.e.", "Δ loss ± s.e.")
    screen.table(f"K = {count:,} of {size:,}, {steps} steps", [shown(*row) for row in rows.items()], header)


def shown(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    share = f"{row['pool_share_sd']:.5f}", f"{row['predicted_sd']:.5f}"
    changes = (f"{row[key]['difference']:+.5f} ± {row[key]['standard_error']:.5f}" for key in ("cosine", "loss"))
    return name, f"{row['outside_share']:.2%}", f"{row['outside_median_excess_rank']:.2%}", *share, *changes


if __name__ == "__main__":
    main()
