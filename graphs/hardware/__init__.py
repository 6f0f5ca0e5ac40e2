"""Known devices and disks with their rates, links between devices, and the time of collectives over
these links."""

from graphs.hardware.devices import (
    DEVICES,
    Hardware,
    HostCopies,
    card_called,
    is_cuda,
    named,
)
from graphs.hardware.disks import DISKS, Disk, disk_named
from graphs.hardware.links import (
    LINKS,
    Link,
    all_gather_s,
    all_reduce_s,
    is_collective,
    link_between,
    link_named,
    reduce_scatter_s,
)
