"""The loop with `pl.attach`, which torchrun starts."""

from torch.utils.data import DataLoader

import paceline as pl
from benchmarks.workload import Meter, arguments, load_job


def main() -> None:
    options = arguments()
    job = load_job(options.job)
    model = job.model()
    optimizer = job.optimizer(model.named_parameters())
    loader = DataLoader(job.data, batch_size=job.batch, shuffle=True)
    meter = Meter(options.steps)
    run = pl.attach(model, optimizer, loader)
    for input, target in run.steps(meter.total_steps):
        loss = job.loss(model(input), target)
        run.backward(loss)
        run.update()
        meter.step_done(loss)
    meter.report(run.rank)


if __name__ == "__main__":
    main()
