# -DCMAKE_TOOLCHAIN_FILE of a build for 64-bit ARM on another machine, by Debian's cross compiler
# (apt-get install g++-aarch64-linux-gnu), or by clang with its headers: -DCMAKE_CXX_COMPILER=clang++. LibTorch must be
# the aarch64 one, for all that is linked.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_CXX_COMPILER_TARGET aarch64-linux-gnu) # clang's --target
# The toolkit that CMake would find is the build machine's.
set(DDP_WITH_CUDA OFF CACHE STRING "Use the CUDA part of LibTorch and NCCL: AUTO, ON or OFF")
