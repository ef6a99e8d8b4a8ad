"""Nets of the floors that are nets: Minder's LSTM-VAE, GDN, and a graph net on the room's layout; small, trained in minutes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.nn import GCNConv

F32 = NDArray[np.float32]
MINDER_WINDOW, MINDER_HIDDEN, MINDER_LATENT = 8, 4, 8
GDN_WINDOW, GDN_SIZE, GDN_NEIGHBOURS = 5, 16, 8
BATCH = 4096


class LstmVae(nn.Module):
    """Windows of one metric, denoised: hidden 4, latent 8, as Minder publishes them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.LSTM(1, MINDER_HIDDEN, batch_first=True)
        self.middle = nn.Linear(MINDER_HIDDEN, MINDER_LATENT)
        self.spread = nn.Linear(MINDER_HIDDEN, MINDER_LATENT)
        self.opening = nn.Linear(MINDER_LATENT, MINDER_HIDDEN)
        self.decoder = nn.LSTM(MINDER_HIDDEN, MINDER_HIDDEN, batch_first=True)
        self.last = nn.Linear(MINDER_HIDDEN, 1)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, (hidden, _) = self.encoder(windows[..., None])
        middle, spread = self.middle(hidden[0]), self.spread(hidden[0]).clamp(-8, 4)
        drawn = middle + torch.randn_like(spread) * torch.exp(0.5 * spread) if self.training else middle
        opened = self.opening(drawn)[:, None].expand(-1, windows.shape[1], -1)
        return self.last(self.decoder(opened.contiguous())[0])[..., 0], middle, spread


def train_vae(windows: F32, seed: int, epochs: int = 3) -> LstmVae:
    """From windows × length."""
    torch.manual_seed(seed)
    net = LstmVae()
    optimiser = torch.optim.Adam(net.parameters(), lr=5e-3)
    for rows in _batches(len(windows), seed, epochs, 512):
        given = torch.from_numpy(windows[rows])
        optimiser.zero_grad()
        made, middle, spread = net(given)
        divergence = -0.5 * (1 + spread - middle**2 - spread.exp()).sum(dim=1).mean()
        ((made - given).square().sum(dim=1).mean() + 0.01 * divergence).backward()
        optimiser.step()
    return net.eval()


@torch.no_grad()
def denoised(net: LstmVae, windows: F32) -> F32:
    """windows × length → the same, reconstructed."""
    parts = [net(torch.from_numpy(part))[0].numpy() for part in np.array_split(windows, max(1, len(windows) // BATCH))]
    return np.concatenate(parts).astype(np.float32)


class Gdn(nn.Module):
    """Forecast of each node from the windows of those nodes that resemble it, by attention (GDN); resemblance comes from the warm-up and
    not from a learnt vector per node, so that nodes never seen have one."""

    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.own = nn.Linear(window * channels, GDN_SIZE)
        self.attention = nn.Linear(2 * GDN_SIZE, 1)
        self.out = nn.Sequential(nn.Linear(GDN_SIZE, 32), nn.ReLU(), nn.Linear(32, channels))

    def forward(self, windows: Tensor, neighbours: Tensor) -> Tensor:
        """windows: nodes × (window · channels); neighbours: nodes × k."""
        own = self.own(windows)
        others = own[neighbours]
        pairs = torch.cat([own[:, None].expand_as(others), others], dim=-1)
        weight = torch.softmax(nn.functional.leaky_relu(self.attention(pairs)), dim=1)
        return self.out(torch.relu((weight * others).sum(dim=1)))  # type: ignore[no-any-return]


def resembling(past: F32, count: int = GDN_NEIGHBOURS) -> NDArray[np.int64]:
    """nodes × features of the warm-up → numbers of the `count` nearest by cosine, without the node itself."""
    units = past - past.mean(axis=0)
    units = units / np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-6)
    found = np.empty((len(units), min(count, len(units) - 1)), dtype=np.int64)
    for at in range(0, len(units), 512):
        close = units[at : at + 512] @ units.T
        close[np.arange(len(close)), np.arange(at, at + len(close))] = -np.inf
        found[at : at + 512] = np.argpartition(-close, found.shape[1] - 1, axis=1)[:, : found.shape[1]]
    return found


def train_gdn(series: list[F32], neighbours: list[NDArray[np.int64]], seed: int, epochs: int = 6) -> Gdn:
    """From rounds × nodes × channels per job."""
    torch.manual_seed(seed)
    net = Gdn(GDN_WINDOW, series[0].shape[2])
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    stream = np.random.default_rng(seed)
    for _ in range(epochs):
        for job in stream.permutation(len(series)).tolist():
            for t in stream.permutation(np.arange(GDN_WINDOW, len(series[job])))[:30].tolist():
                optimiser.zero_grad()
                made = net(*_gdn_given(series[job], neighbours[job], t))
                (made - torch.from_numpy(series[job][t])).abs().mean().backward()
                optimiser.step()
    return net.eval()


@torch.no_grad()
def gdn_errors(net: Gdn, series: F32, neighbours: NDArray[np.int64]) -> F32:
    """rounds × nodes × channels, absolute errors; zero in the first rounds."""
    found = np.zeros_like(series)
    for t in range(GDN_WINDOW, len(series)):
        found[t] = np.abs(net(*_gdn_given(series, neighbours, t)).numpy() - series[t])
    return found


def _gdn_given(series: F32, neighbours: NDArray[np.int64], t: int) -> tuple[Tensor, Tensor]:
    window = series[t - GDN_WINDOW : t].transpose(1, 0, 2).reshape(series.shape[1], -1)
    return torch.from_numpy(np.ascontiguousarray(window)), torch.from_numpy(neighbours)


class LayoutNet(nn.Module):
    """A node's metrics from those of its neighbours in the room: graph convolutions around a bottleneck, the node itself left out."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = GCNConv(channels, 16, add_self_loops=False)
        self.second = GCNConv(16, 16)
        self.last = nn.Linear(16, channels)

    def forward(self, given: Tensor, edges: Tensor) -> Tensor:
        hidden = torch.relu(self.first(given, edges))
        return self.last(torch.relu(self.second(hidden, edges)))  # type: ignore[no-any-return]


def train_layout(series: list[F32], edges: list[NDArray[np.int64]], seed: int, epochs: int = 6) -> LayoutNet:
    """From rounds × nodes × channels per job, and 2 × edges."""
    torch.manual_seed(seed)
    net = LayoutNet(series[0].shape[2])
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    stream = np.random.default_rng(seed)
    for _ in range(epochs):
        for job in stream.permutation(len(series)).tolist():
            for t in stream.permutation(len(series[job]))[:30].tolist():
                optimiser.zero_grad()
                given = torch.from_numpy(series[job][t])
                (net(given, torch.from_numpy(edges[job])) - given).abs().mean().backward()
                optimiser.step()
    return net.eval()


@torch.no_grad()
def layout_errors(net: LayoutNet, series: F32, edges: NDArray[np.int64]) -> F32:
    """rounds × nodes × channels, absolute errors."""
    pairs = torch.from_numpy(edges)
    return np.stack([np.abs(net(torch.from_numpy(row), pairs).numpy() - row) for row in series])


def _batches(count: int, seed: int, epochs: int, size: int) -> list[NDArray[np.int64]]:
    stream = np.random.default_rng(seed)
    return [part for _ in range(epochs) for part in np.array_split(stream.permutation(count), max(1, count // size))]
