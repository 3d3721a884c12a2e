"""A job whose callbacks write down what they are told, for commands, searches and launchers."""

JOB = """
import os, signal, time
import torch
import torch.nn.functional as F
import paceline as pl

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(60, 4, dtype=torch.float64, generator=generator)
noise = 0.3 * torch.randn(60, dtype=torch.float64, generator=generator)
targets = (inputs @ torch.tensor([1.0, 2.0, -1.0, 0.5], dtype=torch.float64) + noise).unsqueeze(1)
samples = list(zip(inputs, targets))

class Diary(pl.Callback):
    def note(self, run, *words):
        with open(run.folder / "diary.txt", "a") as file:
            print(*words, file=file)

    def on_start(self, run):
        self.note(run, "start", run.step)

    def on_step(self, run, step):
        if os.environ.get("PLANTED") == "error" and step.step == 7:
            raise ZeroDivisionError("planted")
        if os.environ.get("PLANTED") == "hangs" and step.step == 7:
            handle = signal.getsignal(signal.SIGINT)

            def hear(number, frame):
                handle(number, frame)
                self.note(run, "asked")

            signal.signal(signal.SIGINT, hear)
            self.note(run, "hangs")
            time.sleep(600)

    def on_evaluation(self, run, evaluation):
        self.note(run, "evaluation", evaluation.step, len(run.state_dict()))

    def on_end(self, run, result):
        self.note(run, "end", result["steps"], result["stopped"] is not None)

    def on_failure(self, run, error):
        self.note(run, "failure", type(error).__name__)

def job(lr: float = 0.3, epochs: int = 12) -> pl.Job:
    return pl.Job(model=lambda: torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)),
                  data=samples[:40], validation=samples[40:], loss=F.mse_loss, batch=8, epochs=epochs,
                  precision="float64", optimizer=lambda named: torch.optim.SGD(named, lr=lr),
                  callbacks=[Diary(), pl.EarlyStopping(patience=2)])
"""
