"""Findings about GPUs, from what was seen of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.cluster.accelerators import Gpu
from paceline.cluster.nvml import Card, Cards
from paceline.cluster.topology import between

NCCL_TIMEOUT_S = 60.0

Outcome = tuple[str, str] | tuple[str, str, str]

FEW_FREE = 0.9  # part of a GPU's memory; if less is free, other processes hold a part that matters


SLOW = 0.5  # part of a link's nominal rate; a copy below it is reported as slow


# The oldest driver for each version of CUDA, by the major number. Source: minor version
# compatibility in NVIDIA's CUDA Compatibility guide.
_LEAST_DRIVER = {11: (450, 80, 2), 12: (525, 60, 13), 13: (580,)}


_NVML_MISSING = "pip install nvidia-ml-py lets it say more: who holds memory, how GPUs are wired, and their health"


@dataclass(frozen=True, slots=True)
class SeenGpus:
    """torch's report on the GPUs."""

    built_for: str  # the version of CUDA; empty in a build for ROCm
    architectures: tuple[str, ...]  # those for which torch has code
    capabilities: tuple[tuple[int, int], ...]  # of each GPU
    access: tuple[tuple[bool, ...], ...]  # whether one GPU can read another's memory
    failures: tuple[str, ...]  # the reason why each GPU can't compute; empty if it can


def judge_gpus(here: Sequence[Gpu], seen: SeenGpus) -> Outcome:
    """Judge whether torch has code for each GPU, and whether each GPU computes."""
    shown = "; ".join(
        f"{f'{count} x ' if count > 1 else ''}{name}, {total / 2**30:.1f} GiB"
        for (name, total), count in Counter((gpu.name, gpu.memory_bytes) for gpu in here).items()
    )
    for index, failure in enumerate(seen.failures):
        if failure:
            return "bad", f"cuda:{index} can't compute: {failure}", _build_for(index, here, seen)
    for index, capability in enumerate(seen.capabilities):
        if seen.built_for and not runs_on(capability, seen.architectures):
            return (
                "bad",
                f"cuda:{index} is of compute capability {capability[0]}.{capability[1]}, and torch has code "
                f"for {' '.join(seen.architectures)}",
                _build_for(index, here, seen),
            )
    return "ok", shown


def _build_for(index: int, here: Sequence[Gpu], seen: SeenGpus) -> str:
    major, minor = seen.capabilities[index]
    return (
        f"install a torch that is built for {here[index].name} (sm_{major}{minor}): older cards need an older "
        "CUDA, newer ones a newer; pytorch.org/get-started/locally has the command"
    )


def runs_on(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether code for some of these architectures runs on a card.

    Binary code runs if it is for the card's generation and for at most its minor number. PTX
    ("compute_..") runs if it is for at most the card's capability.

    Source: NVIDIA, CUDA C++ programming guide, binary compatibility.

    >>> runs_on((8, 6), ["sm_80"]), runs_on((9, 0), ["sm_80"]), runs_on((12, 0), ["sm_90", "compute_90"])
    (True, False, True)
    """
    for text in architectures:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", text)
        if match is None:
            continue
        architecture = int(match[2]), int(match[3])
        if match[4] == "a":  # of one capability alone
            if architecture == capability:
                return True
        elif (match[1] == "compute" and architecture <= capability) or (
            architecture[0] == capability[0] and architecture[1] <= capability[1]
        ):
            return True
    return False


def judge_driver(driver: str | None, cuda: tuple[int, int] | None, built_for: str) -> Outcome:
    """Judge whether the driver runs the version of CUDA for which torch is built.

    Args:
        cuda: The newest version that the driver knows; None if it is not known.
    """
    if not built_for:
        return "ok", "this torch is not built for CUDA, and asks nothing of NVIDIA's driver"
    if driver is None:
        return "ok", f"torch is built for CUDA {built_for}; the driver's version is not visible"
    major, minor = (int(part) for part in built_for.split(".")[:2])
    least = _LEAST_DRIVER.get(major)
    version = tuple(map(int, re.findall(r"\d+", driver)))
    known = f"driver {driver}" + (f", which knows CUDA {cuda[0]}.{cuda[1]}" if cuda else "")
    if least is not None and version < least:
        return (
            "bad",
            f"{known}; torch is built for CUDA {built_for}, which needs {'.'.join(map(str, least))} or "
            "newer",
            "update the driver, or install a torch that is built for an older CUDA: "
            "pytorch.org/get-started/locally has the command",
        )
    if cuda is not None and cuda < (major, minor):
        return (
            "warn",
            f"{known}; torch is built for CUDA {built_for}: its kernels run, and code that is compiled on "
            "the way (PTX, some Triton kernels) may not",
            f"a driver for CUDA {built_for} or newer runs all of it",
        )
    return "ok", f"{known}; torch is built for CUDA {built_for}"


def judge_visible(value: str | None, cards: Cards | None) -> Outcome:
    """Judge which cards CUDA_VISIBLE_DEVICES leaves visible.

    CUDA leaves out the first word that it does not know and all words after it. It leaves out all
    cards if one is named twice.
    """
    if value is None:
        return "ok", "not set: all GPUs are visible"
    words = [word.strip() for word in value.split(",")]
    if value.strip() in ("", "-1"):
        return (
            "warn",
            f"'{value}': no GPU is visible",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs: 0,1",
        )
    fix = "name each GPU once, by its number in nvidia-smi or by its UUID: 0,1 or GPU-..., or unset it"
    if duplicates := [word for word, count in Counter(words).items() if count > 1]:
        return (
            "bad",
            f"{value}: {', '.join(duplicates)} is named twice, and CUDA then shows no GPU",
            fix,
        )
    for number, word in enumerate(words):
        if problem := _unknown(word, cards):
            shown = (
                f"only {', '.join(words[:number])} is visible" if number else "no GPU is visible"
            )
            return "bad" if not number else "warn", f"{value}: {problem}; {shown}", fix
    if any(word.startswith("MIG-") for word in words) and len(words) > 1:
        return (
            "warn",
            f"{value}: a process uses one slice (MIG), the first",
            "one slice a run, or GPUs that are not cut into slices",
        )
    return "ok", value


def _unknown(word: str, cards: Cards | None) -> str:
    """Explain why a word names no GPU; empty if it names one, as far as is known."""
    if re.fullmatch(r"\d+", word):
        if cards is not None and int(word) >= len(cards.cards):
            return f"there is no GPU {word}, they are numbered 0 to {len(cards.cards) - 1}"
        return ""
    if re.fullmatch(r"(GPU|MIG)-[0-9A-Za-z/-]+", word):
        everything = [
            device.uuid
            for card in (cards.cards if cards else ())
            for device in (card, *card.slices)
        ]
        return (
            ""
            if not everything or any(uuid.startswith(word) for uuid in everything)
            else f"there is no {word}"
        )
    return f"'{word}' is neither a number nor a UUID"


def judge_memory(free: Sequence[tuple[int, int, Sequence[str]]]) -> Outcome:
    """Judge whether the GPUs have enough free memory.

    Args:
        free: The free bytes of each GPU, all its bytes, and the holders of the rest in words.
    """
    shown = [
        f"cuda:{index} {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
        + (f" ({'; '.join(holders)})" if holders else "")
        for index, (free_bytes, total_bytes, holders) in enumerate(free)
    ]
    if any(free_bytes < FEW_FREE * total_bytes for free_bytes, total_bytes, _ in free):
        return (
            "warn",
            "; ".join(shown),
            "a run has what is free: end these processes, take other GPUs "
            "(--devices cuda:1), or let it be smaller",
        )
    return "ok", "; ".join(shown)


def judge_health(cards: Sequence[Card | None]) -> Outcome:
    """Judge the health of cards: their slices, errors of their memory, and reasons why they are
    slow.
    """
    known = {f"cuda:{index}": card for index, card in enumerate(cards) if card is not None}
    if not known:
        return "ok", "NVML can't be asked", _NVML_MISSING
    if broken := [
        f"{name} has had {card.ecc_errors} errors of memory that could not be corrected"
        for name, card in known.items()
        if card.ecc_errors
    ]:
        return (
            "bad",
            "; ".join(broken),
            "results may be wrong: reset or replace the card (nvidia-smi -q -d ECC)",
        )
    if cut := [name for name, card in known.items() if card.is_cut or card.uuid.startswith("MIG-")]:
        return (
            "warn",
            f"{', '.join(cut)}: cut into slices (MIG). A process uses one slice, and NCCL does not work "
            "between slices of one card",
            "plans of one rank, or nvidia-smi -mig 0, which needs an administrator",
        )
    if slow := [
        f"{name}: {', '.join(card.slowed_by)}" for name, card in known.items() if card.slowed_by
    ]:
        return (
            "warn",
            f"slowed down now: {'; '.join(slow)}",
            "see to the cooling and the power supply; nvidia-smi -q -d PERFORMANCE",
        )
    if narrow := [
        f"{name} uses {card.pcie_lanes} of {card.most_pcie_lanes} PCIe lanes"
        for name, card in known.items()
        if 0 < card.pcie_lanes < card.most_pcie_lanes
    ]:
        return (
            "warn",
            "; ".join(narrow),
            "the slot, a riser or the BIOS gives it fewer: see to its seat",
        )
    if slack := [name for name, card in known.items() if card.is_persistent is False]:
        return (
            "ok",
            f"no errors; {', '.join(slack)} without persistence mode: a first use takes some seconds more",
            "nvidia-smi -pm 1, which needs an administrator",
        )
    return "ok", "no errors of memory, not slowed down"


def judge_links(
    access: Sequence[Sequence[bool]],
    cards: Sequence[Card | None],
    measured: Mapping[tuple[int, int], float],
) -> Outcome:
    """Judge the link of each two GPUs, whether they can read each other's memory, and the speed of
    copies.

    Args:
        measured: Bytes a second from one GPU to another; pairs that could not be measured are
            missing.
    """
    kinds: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    slow = []
    for first in range(len(access)):
        for other in range(first + 1, len(access)):
            card, other_card = cards[first], cards[other]
            wire = (
                between(card, other_card) if card is not None and other_card is not None else None
            )
            reads = access[first][other] and access[other][first]
            kinds.setdefault((wire.source if wire else "wires unknown", reads), []).append(
                (first, other)
            )
            carried = measured.get((first, other))
            if wire is not None and carried is not None and carried < SLOW * wire.bytes_per_s:
                slow.append(
                    f"cuda:{first} to cuda:{other} carries {carried / 1e9:.3g} GB/s of "
                    f"{wire.bytes_per_s / 1e9:.3g}"
                )
    shown = "; ".join(
        _kind_of_link(name, reads, pairs, measured) for (name, reads), pairs in kinds.items()
    )
    if slow:
        return (
            "warn",
            f"{shown}; {'; '.join(slow)}",
            "another program may use the links; IOMMU and PCIe ACS send "
            "copies between cards through the processor: see troubleshooting in NVIDIA's NCCL guide, and "
            "nvidia-smi topo -m",
        )
    if any(not reads for _, reads in kinds):
        return (
            "warn",
            shown,
            "without peer access messages go through the host's memory: plans that talk little "
            "(data=N, pipeline=N) lose least",
        )
    return "ok", shown


def _kind_of_link(
    name: str,
    reads: bool,
    pairs: Sequence[tuple[int, int]],
    measured: Mapping[tuple[int, int], float],
) -> str:
    rates = sorted(measured[pair] for pair in pairs if pair in measured)
    which = f"{len(pairs)} pairs" if len(pairs) > 1 else "cuda:{}-cuda:{}".format(*pairs[0])
    most = f" to {rates[-1] / 1e9:.3g}" if rates and rates[-1] > 1.05 * rates[0] else ""
    carried = f"{rates[0] / 1e9:.3g}{most} GB/s copied" if rates else "not measured"
    return f"{which} by {name}, {'' if reads else 'no '}peer access, {carried}"


def judge_nccl(version: str, problem: str, seconds: float) -> Outcome:
    """Judge an all-reduce between two GPUs.

    Args:
        problem: The reason of its failure, in short on the last line; empty if it did not fail.
    """
    if not problem:
        return "ok", f"{version}; two GPUs all-reduced within {seconds:.1f} s"
    if any(
        words in problem
        for words in (
            "no answer within",
            "no sign of life",
            "did not go on",
            "did not reach",
            "don't match",
        )
    ):
        return (
            "bad",
            f"{version}; two GPUs began an all-reduce and did not end it in {NCCL_TIMEOUT_S:.0f} s",
            "NCCL_P2P_DISABLE=1 if that helps, cards can't read each other's memory (IOMMU, PCIe ACS, virtual "
            "machines); NCCL_SHM_DISABLE=1 for a small /dev/shm; NCCL_DEBUG=INFO shows where it waits",
        )
    return (
        "bad",
        f"{version}; two GPUs could not all-reduce: {problem.strip().splitlines()[-1]}",
        "NCCL_DEBUG=INFO paceline doctor shows what NCCL tried",
    )
