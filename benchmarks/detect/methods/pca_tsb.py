"""PCA exactly as TSB-AD runs it on many columns: fitted on the very rows it scores. Its published values check our metric."""

from __future__ import annotations

import numpy as np

from benchmarks.detect.methods.base import F64, Method
from benchmarks.detect.methods.windows import standardised


def eigen_distance(rows: F64, components: float | None) -> F64:
    """Sum over the kept components of the distance of each row to the component's unit vector, over its share of variance.

    Zero for constants; a share of nothing (series without noise) counts as 1e-30.
    """
    from scipy.spatial.distance import cdist
    from sklearn.decomposition import PCA

    (scaled,) = standardised(rows)
    scaled = scaled[:, np.any(scaled != 0, axis=0)]
    if not scaled.shape[1]:
        return np.zeros(len(rows))
    model = PCA(n_components=components, random_state=0).fit(scaled)
    return np.asarray(
        np.sum(cdist(scaled, model.components_) / np.maximum(model.explained_variance_ratio_, 1e-30), axis=1),
        np.float64,
    )


class PcaTsb(Method):
    """25 % of the variance, all columns of one row; the training rows are not used."""

    name = "pca-tsb"
    family = "multi"
    paper = "TSB-AD (NeurIPS 2024), PCA after Shyu et al. 2003; transductive"
    needs = ("sklearn",)
    depends = ("benchmarks.detect.methods.windows",)

    def fit(self, train: F64, seed: int) -> None:
        """Nothing is learnt before the rows to score are there."""

    def score(self, test: F64) -> F64:
        return eigen_distance(test, 0.25)
