"""This script trains a speech recogniser with the loop of a well-known tutorial on CTC.

Utterances and texts have different lengths, and the schedule moves with each batch.
Original: https://www.assemblyai.com/blog/end-to-end-speech-recognition-pytorch
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

import paceline as pl

hparams = {
    "n_feats": 5,
    "rnn_dim": 8,
    "n_class": 7,
    "learning_rate": 5e-3,
    "batch_size": 5,
    "epochs": 2,
}
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

rng = torch.Generator().manual_seed(0)
train_dataset = [
    (
        torch.randn(9 + 5 * n % 12, hparams["n_feats"], generator=rng),
        torch.randint(1, 7, (1 + 3 * n % 4,), generator=rng),
    )
    for n in range(23)
]


def data_processing(data):
    spectrograms = [spectrogram for spectrogram, _ in data]
    labels = [label for _, label in data]
    input_lengths = torch.tensor([len(spectrogram) // 2 for spectrogram in spectrograms])
    label_lengths = torch.tensor([len(label) for label in labels])
    spectrograms = nn.utils.rnn.pad_sequence(spectrograms, batch_first=True).transpose(1, 2)
    labels = nn.utils.rnn.pad_sequence(labels, batch_first=True)
    return spectrograms, labels, input_lengths, label_lengths


class SpeechRecognitionModel(nn.Module):
    def __init__(self, n_feats, rnn_dim, n_class):
        super().__init__()
        self.cnn = nn.Conv1d(n_feats, rnn_dim, 3, stride=2, padding=1)
        self.layer_norm = nn.LayerNorm(rnn_dim)
        self.rnn = nn.GRU(rnn_dim, rnn_dim, batch_first=True)
        self.classifier = nn.Sequential(
            nn.Linear(rnn_dim, rnn_dim), nn.GELU(), nn.Linear(rnn_dim, n_class)
        )

    def forward(self, x):
        x = self.cnn(x).transpose(1, 2)
        x, _ = self.rnn(F.gelu(self.layer_norm(x)))
        return self.classifier(x)


train_loader = DataLoader(
    train_dataset, batch_size=hparams["batch_size"], shuffle=True, collate_fn=data_processing
)
torch.manual_seed(7)
model = SpeechRecognitionModel(hparams["n_feats"], hparams["rnn_dim"], hparams["n_class"]).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), hparams["learning_rate"])
criterion = nn.CTCLoss(blank=0).to(device)
scheduler = torch.optim.lr_scheduler.OneCycleLR(
    optimizer,
    max_lr=hparams["learning_rate"],
    steps_per_epoch=len(train_loader),
    epochs=hparams["epochs"],
    anneal_strategy="linear",
)

run = pl.attach(model, optimizer, train_loader, schedule=scheduler)
for epoch in run.epochs(hparams["epochs"]):
    model.train()
    for batch_idx, _data in enumerate(run):
        spectrograms, labels, input_lengths, label_lengths = _data
        spectrograms, labels = spectrograms.to(device), labels.to(device)
        output = model(spectrograms)
        output = F.log_softmax(output, dim=2).transpose(0, 1)
        loss = criterion(output, labels, input_lengths, label_lengths)
        run.backward(loss)
        run.update()
        print(f"Train Epoch: {epoch} [{batch_idx}/{len(train_loader)}]\tLoss: {loss.item():.6f}")
