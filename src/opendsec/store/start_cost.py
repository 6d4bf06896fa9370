"""How much of an image a start really reads, from what was recorded of earlier starts (`store.loading.profiles`)."""

from __future__ import annotations

from opendsec.model.image import Image
from opendsec.model.image_view import StartCost
from opendsec.store.catalogue import StartCostOf
from opendsec.store.loading.profiles import startup_bytes
from opendsec.store.loading.sources import StoreFiles


def recorded_starts(files: StoreFiles) -> StartCostOf:
    """Looks the layers' profiles up among the files of a store."""

    def cost(image: Image) -> StartCost | None:
        read = startup_bytes(files, image)
        return (
            None if read is None else StartCost(read_bytes=read, of_bytes=sum(one.size_bytes for one in image.layers))
        )

    return cost
