#!/usr/bin/env python3
"""Passes packets on between two network interfaces, each after a delay: what a long way adds, on
kernels without netem.

    benchmarks/delayed_link.py INTERFACE INTERFACE SECONDS

Started by two_hosts.py. Needs root and Linux. A process for each direction; packets keep their
order, and none is lost.
"""

import collections
import os
import select
import socket
import sys
import time

# Of <linux/if_packet.h> and <asm/socket.h>, which Python's socket does not name.
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, SO_RCVBUFFORCE = 263, 15, 23, 33
ETH_P_ALL = 3
# Bytes of a packet: the kernel joins those of a connection.
LARGEST = 1 << 17
WAITING = 64 << 20  # bytes that may wait in a socket


def opened(interface):
    found = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    # Packets come joined and without checksums, and go so.
    found.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    found.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    found.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, WAITING)
    found.bind((interface, 0))
    found.setblocking(False)
    return found


def pass_on(source, target, delay):
    """For ever."""
    # (when a packet is due, the packet).
    waiting = collections.deque()
    arrival = select.poll()
    arrival.register(source, select.POLLIN)
    while True:
        arrival.poll(max(0, 1000 * (waiting[0][0] - time.monotonic())) if waiting else None)
        now = time.monotonic()
        while packet := received(source):
            waiting.append((now + delay, packet))
        while waiting and waiting[0][0] <= time.monotonic() and sent(target, waiting[0][1]):
            waiting.popleft()


def received(source):
    try:
        return source.recv(LARGEST)
    except BlockingIOError:
        return None


def sent(target, packet):
    try:
        return target.send(packet)
    except BlockingIOError:
        return 0


def main():
    first, second = map(opened, sys.argv[1:3])
    delay = float(sys.argv[3])
    print("ready", flush=True)
    if os.fork():
        pass_on(first, second, delay)
    else:
        pass_on(second, first, delay)


if __name__ == "__main__":
    main()
