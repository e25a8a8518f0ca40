"""A node's simulated devices, in a process of their own, with pynvml's surface and the tools of the real thing.

The simulator enforces only what was configured by the calls that hardware would need: an agent that forgets a limit
sees its neighbour run out of memory.
"""
