# -DCMAKE_TOOLCHAIN_FILE of a build for 64-bit ARM on another machine, by Debian's cross compiler
# (apt-get install g++-aarch64-linux-gnu). LibTorch must be the aarch64 one, for all that is linked.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
# The toolkit that CMake would find is the build machine's.
set(DDP_WITH_CUDA OFF CACHE STRING "Use the CUDA part of LibTorch and NCCL: AUTO, ON or OFF")
