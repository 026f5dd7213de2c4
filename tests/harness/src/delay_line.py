"""A switch that forwards every frame after a delay: delay_line.py SECONDS TAP...

Creates the named TAP devices, for kernels whose tc has no netem. Runs until it is killed.
"""

import collections
import fcntl
import os
import select
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000

delay = float(sys.argv[1])
taps = []
for name in sys.argv[2:]:
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_NO_PI))
    taps.append(tap)

queue = collections.deque()  # (due, source, frame), in order, because every frame waits equally long
where = {}  # hardware address -> tap
while True:
    wait = max(0.0, queue[0][0] - time.monotonic()) if queue else None
    for tap in select.select(taps, [], [], wait)[0]:
        try:
            queue.append((time.monotonic() + delay, tap, os.read(tap, 65536 + 64)))
        except OSError:
            pass  # the link is down
    while queue and queue[0][0] <= time.monotonic():
        _, source, frame = queue.popleft()
        where[frame[6:12]] = source
        known = where.get(frame[:6])
        for tap in [known] if known is not None else taps:
            if tap != source:
                try:
                    os.write(tap, frame)
                except OSError:
                    pass  # the link is down, or its queue is full, as on a real one
