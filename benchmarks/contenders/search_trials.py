"""The same trials as Paceline's, run by others: Optuna with one process a trial, and Ray Tune.

    python -m benchmarks.contenders.search_trials optuna|ray TRIALS PROCESSES     # prints JSON

Each trial trains the net of `examples/05_search.py` at its defaults, with another learning rate, in a plain loop.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "05_search.py"


def trial(lr: float) -> float:
    """The validation loss after the job's epochs."""
    import torch

    job = runpy.run_path(str(EXAMPLE))["job"](lr=lr)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    train = torch.utils.data.DataLoader(job.data, batch_size=job.batch, shuffle=True)
    inputs, targets = (
        torch.stack([torch.as_tensor(each[k]) for each in job.validation]) for k in range(2)
    )
    loss = torch.tensor(0.0)
    for _ in range(job.epochs):
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            job.loss(model(x), y).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = job.loss(model(inputs), targets)
    return float(loss)


def run_optuna(trials: int, processes: int) -> None:
    """A process a trial: the way around leaks, and around ranks that would each sample."""
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))

    def run_trial(_: int) -> None:
        trial = study.ask()
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        ran = subprocess.run(
            [sys.executable, "-m", "benchmarks.contenders.search_trials", "trial", str(lr), "1"],
            capture_output=True,
            text=True,
            check=True,
        )
        study.tell(trial, float(ran.stdout.split()[-1]))

    with ThreadPoolExecutor(processes) as workers:
        list(workers.map(run_trial, range(trials)))


def run_ray(trials: int, processes: int) -> None:
    """Ray Tune at its defaults: an actor a trial, on one CPU."""
    import ray
    from ray import tune

    ray.init(num_cpus=processes, include_dashboard=False, log_to_driver=False)
    tuner = tune.Tuner(
        lambda config: {"loss": trial(config["lr"])},
        param_space={"lr": tune.loguniform(1e-4, 1e-1)},
        tune_config=tune.TuneConfig(num_samples=trials, metric="loss", mode="min"),
        run_config=tune.RunConfig(verbose=0),
    )
    results = tuner.fit()
    assert len(results) == trials and not results.num_errors
    ray.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=["optuna", "ray", "trial"])
    parser.add_argument("trials", type=float)
    parser.add_argument("processes", type=int)
    options = parser.parse_args()
    if options.kind == "trial":
        print(trial(options.trials))
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    began_s = time.perf_counter()
    (run_optuna if options.kind == "optuna" else run_ray)(int(options.trials), options.processes)
    print(json.dumps({"trials": int(options.trials), "seconds": time.perf_counter() - began_s}))


if __name__ == "__main__":
    main()
