"""A learner that makes its data anew between epochs: a rollout is alike on all ranks."""

from __future__ import annotations

from tests.attached.scripts import SETUP, assert_alike, told

ROLLOUTS = (
    SETUP
    + """
class Buffer(torch.utils.data.Dataset):
    def __init__(self):
        self.states = self.actions = self.advantages = torch.zeros(20)

    def fill(self):
        self.states = torch.randn(20, 4)
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        hidden = torch.tanh(self.states @ whole[0].T + whole[1])
        policy = torch.distributions.Categorical(logits=hidden @ whole[2].T + whole[3])
        self.actions = policy.sample()
        self.logs = policy.log_prob(self.actions)
        rewards = torch.randn(20) + self.actions
        self.advantages = (rewards - rewards.mean()) / rewards.std()

    def __len__(self):
        return 20

    def __getitem__(self, place):
        return self.states[place], self.actions[place], self.logs[place], self.advantages[place]


buffer = Buffer()
run = pl.attach(model, optimizer, DataLoader(buffer, batch_size=6, shuffle=True), clip=0.5)
for epoch in run.epochs(4):
    if epoch % 2 == 0:
        with torch.no_grad(), run.alike():
            buffer.fill()
    for states, actions, logs, advantages in run:
        ratio = (torch.distributions.Categorical(logits=model(states)).log_prob(actions) - logs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        run.backward(loss)
        run.update()
tell()
"""
)


def test_rollouts_and_their_updates_are_those_of_one_device(tmp_path):
    whole, ranks = (told(tmp_path, ROLLOUTS, plan) for plan in ("single", "data=2"))

    assert whole["figures"]["steps"] == 16
    assert_alike(ranks["weights"], whole["weights"])
