"""A few balls that hold all keys of a cache: proof, without reading a key, that a query keeps none.

A query whose scores are all below the threshold has to look at every key to know it. In models of few tokens that is
common: keys of the first layer depend on the token alone, and some token's query keeps none of them. The dot product of
q with any key in a ball of centre c and radius r is at most q.c + |q| r, so a few balls decide such a query at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

MOST = 64  # balls per head: as much work for a query as one block of keys
# Of the largest norm: keys farther than this from every centre start a ball of their own, up to MOST of them.
REACH = 0.125
PIECE = 8192  # keys described at a time
PATIENCE = 1 << 15  # queries examined without success before giving up


class KeyBalls:
    """Balls around the keys of one cache layer. Keys may only be added; describing more than there are is harmless."""

    def __init__(self) -> None:
        self.length = 0  # keys described
        self.proven = 0  # rows found to keep nothing
        self.looked_at = 0  # queries, over all heads at once
        self._centres: Tensor | None = None  # [B * Hkv, balls, D]
        self._radius: Tensor | None = None  # [B * Hkv, balls], -inf where there is no ball yet
        self._norm: Tensor | None = None  # [B * Hkv], the largest of any key

    @property
    def is_in_vain(self) -> bool:
        """Many queries were looked at and none was proven: keys this far apart are not worth describing."""
        return self.proven == 0 and self.looked_at >= PATIENCE

    @torch.no_grad()
    def append(self, k_new: Tensor) -> None:
        """k_new [B, Hkv, n, D] follow the keys described so far."""
        for piece in k_new.split(PIECE, dim=2):
            if piece.shape[2]:
                self._add(piece.float().flatten(0, 1))
                self.length += piece.shape[2]

    def _add(self, keys: Tensor) -> None:
        heads, _, width = keys.shape
        if self._centres is None or self._radius is None or self._norm is None:
            self._centres = keys.new_zeros(heads, MOST, width)
            self._radius = keys.new_full((heads, MOST), -torch.inf)
            self._norm = keys.new_zeros(heads)
        # What is written to below is copied first: a tensor made in inference mode cannot be changed outside it.
        centres, radius = self._centres.clone(), self._radius.clone()
        self._norm = torch.maximum(self._norm, keys.norm(dim=-1).amax(-1).nan_to_num(nan=torch.inf))
        used = radius.isneginf().logical_not()  # [heads, balls]
        nearest, ball = torch.cdist(keys, centres).masked_fill(~used[:, None], torch.inf).min(-1)  # [heads, n]
        while True:
            count = used.sum(-1)
            wanted = (nearest > REACH * self._norm[:, None]).any(-1) & (count < MOST)  # [heads]
            if not bool(wanted.any()):
                break
            farthest = nearest.argmax(-1)[:, None, None].expand(-1, 1, width)
            centre = keys.gather(1, farthest)  # [heads, 1, D]
            chosen = torch.nn.functional.one_hot(count.clamp(max=MOST - 1), MOST).bool() & wanted[:, None]
            centres = torch.where(chosen[..., None], centre, centres)
            radius = torch.where(chosen, 0.0, radius)
            used = used | chosen
            distance = (keys - centre).norm(dim=-1)
            closer = wanted[:, None] & (distance < nearest)
            nearest = torch.where(closer, distance, nearest)
            ball = torch.where(closer, count[:, None], ball)
        # Which ball a key goes to may be a little off (cdist rounds); how far it lies from that centre may not.
        distance = (keys - centres.gather(1, ball[..., None].expand(-1, -1, width))).norm(dim=-1)
        distance = distance.nan_to_num(nan=torch.inf) * 1.0001
        self._centres, self._radius = centres, radius.scatter_reduce(1, ball, distance, "amax")

    @torch.no_grad()
    def keeps_nothing(self, q: Tensor, scale: float, threshold: float | Tensor) -> Tensor:
        """bool [B, Hq, T]: no key described scores above the threshold, for certain. q [B, Hq, T, D]."""
        assert self._centres is not None and self._radius is not None and self._norm is not None
        batch, heads, length, width = q.shape
        key_heads = self._centres.shape[0] // batch
        rows = q.float().reshape(batch * key_heads, -1, width)  # heads that share keys side by side
        # Rounding of the dot product, ours and that of whoever decides: generous, and far below any score that matters.
        slack = width * 2.0**-21 * self._norm  # [B * Hkv]
        reach = self._radius + slack[:, None]
        upper = torch.baddbmm(
            rows.norm(dim=-1, keepdim=True) * 1.0001 * reach.clamp(min=0.0)[:, None],
            rows,
            self._centres.transpose(1, 2),
        )
        highest = upper.masked_fill(self._radius.isneginf()[:, None], -torch.inf).amax(-1)
        proven = highest.view(batch, heads, length) * scale <= threshold
        self.looked_at += length
        self.proven += int(proven.sum())
        return proven
