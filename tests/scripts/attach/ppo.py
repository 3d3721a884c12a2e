"""This script trains an agent by proximal policy optimisation with the loop of CleanRL's `ppo.py`.

A step's data are what the agent has just done; a rollout is learned from in shuffled minibatches, whose advantages are
normalised.
Original: https://github.com/vwxyzjn/cleanrl/blob/master/cleanrl/ppo.py
"""

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.distributions.categorical import Categorical

import paceline as pl

seed, learning_rate, num_envs, num_steps, num_updates = 1, 2.5e-3, 3, 10, 2
gamma, gae_lambda, update_epochs, clip_coef = 0.99, 0.95, 2, 0.2
ent_coef, vf_coef, max_grad_norm = 0.01, 0.5, 0.5
batch_size, minibatch_size = num_envs * num_steps, 7


class Balance:
    """Balls on beams: an action tips a beam to one side, and a ball that falls off begins anew."""

    def __init__(self):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.state = self.rng.uniform(-0.1, 0.1, (num_envs, 2))
        return self.state.copy()

    def step(self, action):
        self.state[:, 1] += 0.1 * (2 * action - 1) + 0.2 * self.state[:, 0]
        self.state[:, 0] += self.state[:, 1]
        reward, done = 1 - np.abs(self.state[:, 0]), np.abs(self.state[:, 0]) > 1
        self.state[done] = self.rng.uniform(-0.1, 0.1, (int(done.sum()), 2))
        return self.state.copy(), reward, done


def layer_init(layer, std=2**0.5, bias_const=0.0):
    torch.nn.init.orthogonal_(layer.weight, std)
    torch.nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(
            layer_init(nn.Linear(2, 8)), nn.Tanh(), layer_init(nn.Linear(8, 1), std=1.0)
        )
        self.actor = nn.Sequential(
            layer_init(nn.Linear(2, 8)), nn.Tanh(), layer_init(nn.Linear(8, 2), std=0.01)
        )

    def get_value(self, x):
        return self.critic(x)

    def get_action_and_value(self, x, action=None):
        probs = Categorical(logits=self.actor(x))
        if action is None:
            with run.alike():
                action = probs.sample()
        return action, probs.log_prob(action), probs.entropy(), self.critic(x)


if __name__ == "__main__":
    np.random.seed(seed)
    torch.manual_seed(seed)
    envs = Balance()
    agent = Agent()
    optimizer = optim.Adam(agent.parameters(), lr=learning_rate, eps=1e-5)
    loader = torch.utils.data.DataLoader(range(batch_size), minibatch_size, shuffle=True)
    run = pl.attach(agent, optimizer, loader, clip=max_grad_norm)
    epochs = run.epochs(num_updates * update_epochs)

    obs = torch.zeros((num_steps, num_envs, 2))
    actions = torch.zeros((num_steps, num_envs))
    logprobs, rewards, dones, values = (torch.zeros((num_steps, num_envs)) for _ in range(4))

    next_obs = torch.Tensor(envs.reset())
    next_done = torch.zeros(num_envs)

    for update in range(1, num_updates + 1):
        frac = 1.0 - (update - 1.0) / num_updates
        optimizer.param_groups[0]["lr"] = frac * learning_rate

        for step in range(num_steps):
            obs[step] = next_obs
            dones[step] = next_done
            with torch.no_grad():
                action, logprob, _, value = agent.get_action_and_value(next_obs)
                values[step] = value.flatten()
            actions[step] = action
            logprobs[step] = logprob
            next_obs, reward, done = envs.step(action.cpu().numpy())
            rewards[step] = torch.tensor(reward)
            next_obs, next_done = torch.Tensor(next_obs), torch.Tensor(done)

        with torch.no_grad():
            next_value = agent.get_value(next_obs).reshape(1, -1)
            advantages = torch.zeros_like(rewards)
            lastgaelam = 0
            for t in reversed(range(num_steps)):
                if t == num_steps - 1:
                    nextnonterminal = 1.0 - next_done
                    nextvalues = next_value
                else:
                    nextnonterminal = 1.0 - dones[t + 1]
                    nextvalues = values[t + 1]
                delta = rewards[t] + gamma * nextvalues * nextnonterminal - values[t]
                lastgaelam = delta + gamma * gae_lambda * nextnonterminal * lastgaelam
                advantages[t] = lastgaelam
            returns = advantages + values

        b_obs = obs.reshape((-1, 2))
        b_logprobs = logprobs.reshape(-1)
        b_actions = actions.reshape(-1)
        b_advantages = advantages.reshape(-1)
        b_returns = returns.reshape(-1)
        b_values = values.reshape(-1)

        for _ in range(update_epochs):
            next(epochs)
            for mb_inds in run:
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(
                    b_obs[mb_inds], b_actions.long()[mb_inds]
                )
                ratio = (newlogprob - b_logprobs[mb_inds]).exp()

                mb_advantages = b_advantages[mb_inds]
                every = run.gather(mb_advantages)
                mb_advantages = (mb_advantages - every.mean()) / (every.std() + 1e-8)

                pg_loss1 = -mb_advantages * ratio
                pg_loss2 = -mb_advantages * torch.clamp(ratio, 1 - clip_coef, 1 + clip_coef)
                pg_loss = torch.max(pg_loss1, pg_loss2).mean()

                newvalue = newvalue.view(-1)
                v_loss_unclipped = (newvalue - b_returns[mb_inds]) ** 2
                v_clipped = b_values[mb_inds] + torch.clamp(
                    newvalue - b_values[mb_inds], -clip_coef, clip_coef
                )
                v_loss_clipped = (v_clipped - b_returns[mb_inds]) ** 2
                v_loss = 0.5 * torch.max(v_loss_unclipped, v_loss_clipped).mean()

                loss = pg_loss - ent_coef * entropy.mean() + v_loss * vf_coef

                run.backward(loss)
                run.update()

        print(f"update {update}: reward {rewards.mean().item():.4f} loss {loss.item():.4f}")
