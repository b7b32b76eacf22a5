"""AdamW for ranks that see a part of each batch, on Horovod."""

import horovod.torch as hvd

from ..pytorch.adam import AdamWOfRanks


class AdamW(AdamWOfRanks):
    __doc__ = AdamWOfRanks.__doc__

    _known_as = "hvdc.AdamW"
    _size = staticmethod(hvd.size)
