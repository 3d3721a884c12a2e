"""A Transformers model from its configuration as a job to plan for. Nothing is downloaded, and no
weights are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.base.errors import MissingPackage, UsageError, nearest, with_extra
from paceline.cluster.cluster import Cluster
from paceline.job import Job
from paceline.planner.problem import PlanningProblem
from paceline.planner.remedies import Attempt
from paceline.runs.documents import read

SHORTEST, LOWEST_RANK = 128, 4  # the smallest sequences and adapters that are suggested
USUAL_RANK = 16  # rank of suggested adapters, if training all weights needs too much memory


@dataclass(frozen=True)
class FineTuning:
    """A fine-tuning run, with the settings that a plan depends on.

    Args:
        hf: A folder with a config.json, such a file, or a type of model such as "llama" in its usual
            size.
        batch: Samples of a step, with --hf.
        sequence: Tokens of a sample, with --hf.
        lora: Rank of peft's adapters, with --hf; by default all weights are trained. The adapters are
            on the layers that peft names for the model.
        dtype: float32, bfloat16 or float16 weights, with --hf; by default what the configuration says.
            It is float32 if the configuration says nothing.
    """

    hf: str
    batch: int = 8
    sequence: int = 1024
    lora: int | None = None
    dtype: str = ""

    def __post_init__(self) -> None:
        for name, value in (
            ("--batch", self.batch),
            ("--sequence", self.sequence),
            ("--lora", self.lora),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if self.dtype not in ("", "float32", "bfloat16", "float16"):
            raise UsageError(
                f"--dtype {self.dtype}: {nearest(self.dtype, ['float32', 'bfloat16', 'float16'])}"
            )

    def job(self) -> Job:
        """Return the job. It computes in bf16 and trains with AdamW.

        Raises:
            MissingPackage: transformers is not installed, or peft if adapters are asked for.
            UsageError: there is no configuration, or the model is no language model or has fewer
                positions.
        """
        import torch

        config, dtype = self._config(), self.weights_dtype
        kind = _language_model(config)
        if self.sequence > (room := _positions(config, kind, self.sequence)):
            raise UsageError(
                f"--hf {self.hf} has {room:,} positions, and --sequence is {self.sequence:,}",
                hint=f"--sequence {room}",
            )
        if self.lora is not None:
            _imported("peft")

        def model() -> torch.nn.Module:
            built = kind.from_config(config, dtype=getattr(torch, dtype))
            return built if self.lora is None else _with_adapters(built, self.lora)

        ids = torch.zeros(self.sequence, dtype=torch.long)
        return Job(
            model=model,
            data=[{"input_ids": ids, "labels": ids}] * self.batch,
            batch=self.batch,
            steps=1000,
            optimizer=lambda named: torch.optim.AdamW(named, lr=1e-4),
            precision="bf16",
        )

    @property
    def weights_dtype(self) -> str:
        """The dtype of the model's weights."""
        stated = self._config().dtype
        return self.dtype or str(stated or "float32").removeprefix("torch.")

    def smaller(self, cluster: Cluster) -> list[list[Attempt]]:
        """Return changes of the job that need less memory, by kind, each from small to large."""

        def attempt(change: FineTuning) -> Any:
            return lambda: (PlanningProblem.of(change.job(), device=cluster.first_here), cluster)

        halves = [replace(self, dtype="bfloat16")] if self.weights_dtype == "float32" else []
        adapters = (
            [replace(self, lora=USUAL_RANK, dtype="bfloat16")]
            if self.lora is None
            else [
                replace(self, lora=rank)
                for rank in (self.lora // 2, self.lora // 4)
                if rank >= LOWEST_RANK
            ]
        )
        shorter = [
            replace(self, sequence=self.sequence // times)
            for times in (2, 4)
            if self.sequence // times >= SHORTEST
        ]
        return [
            [("--dtype bfloat16", attempt(change)) for change in halves],
            [
                (
                    f"--lora {change.lora}" + (" --dtype bfloat16" if self.lora is None else ""),
                    attempt(change),
                )
                for change in adapters
            ],
            [(f"--sequence {change.sequence}", attempt(change)) for change in shorter],
        ]

    def _config(self) -> Any:
        transformers = _imported("transformers")
        path = Path(self.hf).expanduser()
        file = path / "config.json" if path.is_dir() else path
        if file.is_file():
            stated = read(file)
            kind, fields = (
                stated.get("model_type"),
                {k: v for k, v in stated.items() if k != "model_type"},
            )
            if not isinstance(kind, str):
                raise UsageError(
                    f"{file} has no model_type: it is no configuration of Transformers"
                )
        elif path.exists() or "/" in self.hf:
            raise UsageError(
                f"--hf {self.hf}: there is no config.json, and nothing is downloaded",
                hint="huggingface-cli download NAME config.json --local-dir FOLDER fetches one",
            )
        else:
            kind, fields = self.hf, {}
        known = list(transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES)
        if kind not in known:
            close = nearest(kind, known)
            raise UsageError(
                f"--hf {self.hf}: no type of model, {close if 'mean' in close else 'nor a folder'}".partition(
                    "? Known"
                )[0],
                hint="a folder with config.json, or a type such as llama",
            )
        try:
            config = transformers.AutoConfig.for_model(kind, **fields)
        except Exception as error:  # each type of model checks its fields in its own way
            raise UsageError(
                f"--hf {self.hf}: Transformers refuses this configuration: {error}"
            ) from error
        config.use_cache = False
        return config


def _language_model(config: Any) -> Any:
    """Return the Transformers class that builds the model with a loss over tokens.

    Raises:
        UsageError: there is no such class.
    """
    transformers = _imported("transformers")
    for kind in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM):
        if type(config) in kind._model_mapping:
            return kind
    raise UsageError(
        f"{type(config).__name__} is of no language model",
        hint="write a job file with the model and its data: `paceline docs job`",
    )


def _positions(config: Any, kind: Any, sequence: int) -> float:
    """Return how many positions the model's table has.

    The number is infinite if the model computes positions, or surely has enough of them.
    """
    import torch

    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or sequence < most - 2:
        return math.inf
    with torch.device("meta"):
        model = kind.from_config(config)
    tables = [
        module
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding)
        and most <= module.num_embeddings <= most + 2
        and module.num_embeddings != config.vocab_size
    ]
    # The first rows of some tables stand for no position.
    return min(
        (
            table.num_embeddings
            - getattr(table, "offset", 0)
            - (0 if table.padding_idx is None else table.padding_idx + 1)
            for table in tables
        ),
        default=math.inf,
    )


def _with_adapters(model: Any, rank: int) -> Any:
    peft = _imported("peft")
    kinds = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    usual = None if model.config.model_type in kinds else "all-linear"
    return peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=usual)
    )


def _imported(package: str) -> Any:
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise MissingPackage(
            "--hf" if package == "transformers" else "--lora",
            package,
            install=with_extra("transformers"),
        ) from error
