"""Counts the modes of Stacked-MNIST that a generator reaches, from what a classifier reads in the three channels.

Metz et al. 2017, https://arxiv.org/abs/1611.02163, and Srivastava et al. 2017, https://arxiv.org/abs/1705.07761.
"""

import numpy as np
import numpy.typing as npt


def mode_metrics(read: npt.NDArray[np.integer], classes: int) -> dict[str, float]:
    """Returns how many modes the images have, and the Kullback-Leibler divergence of their shares from equal shares.

    read: (images, channels) classes; every sequence of them is a mode: 1,000 for three digits. The divergence is in
    nats. That of n images that do have equal shares is about (modes - 1) / 2n, not 0.
    """
    channels = read.shape[1]
    shares = np.unique(read @ classes ** np.arange(channels), return_counts=True)[1] / len(read)
    divergence = channels * np.log(classes) + (shares * np.log(shares)).sum()
    return {"modes": float(len(shares)), "modes_kl": float(divergence)}
