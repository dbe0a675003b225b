"""Kernels of mlxserve. ``ops`` has the public functions, ``reference`` a twin of each in mlx ops, ``cpu/``
the C++ extension (Linux). ``dispatch`` picks the implementation."""
