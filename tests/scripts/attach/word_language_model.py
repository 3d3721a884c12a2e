"""This script trains an LSTM language model with the loop of PyTorch's example.

The state of the LSTM goes on from batch to batch, samples lie along the second dim, weights are updated by hand, and
the learning rate falls if the validation loss does not.
Original: https://github.com/pytorch/examples/blob/main/word_language_model/main.py
"""

import math

import torch
import torch.nn as nn

import paceline as pl

emsize, nhid, nlayers, ntokens = 6, 8, 2, 17
lr, clip, epochs, batch_size, eval_batch_size, bptt, log_interval = 20, 0.25, 3, 5, 2, 6, 3


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


corpus = torch.randint(ntokens, (240,), generator=torch.Generator().manual_seed(0))
train_data = batchify(corpus[:173], batch_size)
val_data = batchify(corpus[173:], eval_batch_size)


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(ntokens, emsize)
        self.rnn = nn.LSTM(emsize, nhid, nlayers)
        self.decoder = nn.Linear(nhid, ntokens)
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, ntokens), hidden

    def init_hidden(self, bsz):
        return torch.zeros(nlayers, bsz, nhid), torch.zeros(nlayers, bsz, nhid)


torch.manual_seed(1111)
model = RNNModel()
criterion = nn.CrossEntropyLoss()
chunks = [train_data[i : i + bptt + 1] for i in range(0, train_data.size(0) - 1, bptt)]
columns = [chunk[:, column] for chunk in chunks for column in range(batch_size)]
loader = torch.utils.data.DataLoader(columns, batch_size)
optimizer = torch.optim.SGD(model.parameters(), lr)
run = pl.attach(model, optimizer, loader, clip=clip)


def repackage_hidden(h):
    """Wraps hidden states in new Tensors, to detach them from their history."""
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    data = source[i : i + seq_len]
    target = source[i + 1 : i + 1 + seq_len].reshape(-1)
    return data, target


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, bptt):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train():
    model.train()
    total_loss = 0.0
    for batch, rows in enumerate(run):
        data, targets = get_batch(rows.t(), 0)
        if batch == 0:
            hidden = model.init_hidden(len(rows))
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        run.backward(loss)
        run.update()
        total_loss += loss.item()
        if batch % log_interval == 0 and batch > 0:
            cur_loss = total_loss / log_interval
            print(f"| epoch {epoch:3d} | {batch:5d} | lr {lr:02.2f} | loss {cur_loss:5.2f}")
            total_loss = 0


best_val_loss = None
for epoch in run.epochs(epochs):
    train()
    val_loss = evaluate(val_data)
    print(f"| end of epoch {epoch:3d} | valid loss {val_loss:5.2f} | ppl {math.exp(val_loss):8.2f}")
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        optimizer.param_groups[0]["lr"] /= 4.0
