# Finds LibTorch, as a pip wheel or as the zip, and gives the imported target `torch`.
# Used by this project's build and, installed beside ddpConfig.cmake, by the projects that use it.
#
# Where it looks, first hit wins:
#   1. a target `torch` that the enclosing project made;
#   2. Torch_DIR (variable or environment), then Torch_ROOT and CMAKE_PREFIX_PATH (the same);
#   3. DDP_TORCH_BESIDE, which an installed package sets: LibTorch's wheel beside ddp's;
#   4. the wheel of version DDP_TORCH_WHEEL that scripts/setup.sh made ready last, in
#      ${XDG_CACHE_HOME:-~/.cache}/ddp.
# An installed package sets DDP_TORCH_BUILT_WITH, the version that it was built with, for the error.
#
# DDP_WITH_CUDA (AUTO, ON or OFF) chooses between two variants:
#   CUDA  LibTorch's own find_package(Torch), which needs the CUDA toolkit at configure time.
#   CPU   links torch_cpu and c10 only. The wheel on PyPI is a CUDA build whose package insists on
#         a toolkit, so without one its CPU part is described here instead.
#
# The target asks its users for the C++ that LibTorch's headers need: 17, and from 2.14 on 20.
#
# Sets Torch_VERSION; DDP_CUDA: whether the CUDA variant was chosen; and DDP_HAS_NCCL: whether
# ProcessGroupNCCL.hpp can be compiled, which needs the target ddp_nccl (nccl.h's folder).

set(DDP_TORCH_MINIMUM 2.11)
if(NOT DEFINED DDP_TORCH_WHEEL)
  set(DDP_TORCH_WHEEL 2.11.0 CACHE STRING "Version of the wheel to take, of those in setup.sh's folder")
endif()

# The first folder with a TorchConfig.cmake, or "".
function(ddp_locate_torch result)
  foreach(given IN ITEMS "${Torch_DIR}" "$ENV{Torch_DIR}")
    if(given AND NOT EXISTS "${given}/TorchConfig.cmake")
      message(FATAL_ERROR "Torch_DIR: expected a folder with TorchConfig.cmake, got '${given}'. "
        "It is <LibTorch>/share/cmake/Torch, for the zip and for the pip wheel.")
    elseif(given)
      set(${result} "${given}" PARENT_SCOPE)
      return()
    endif()
  endforeach()

  set(prefixes "${Torch_ROOT}" "$ENV{Torch_ROOT}" ${CMAKE_PREFIX_PATH})
  string(REPLACE ":" ";" from_environment "$ENV{CMAKE_PREFIX_PATH}")
  list(APPEND prefixes ${from_environment})
  set(candidates "")
  foreach(prefix IN LISTS prefixes)
    # A zip's prefix is its root; a wheel's is often given as torch.utils.cmake_prefix_path.
    list(APPEND candidates "${prefix}/share/cmake/Torch" "${prefix}/Torch")
  endforeach()
  list(APPEND candidates "${DDP_TORCH_BESIDE}/share/cmake/Torch")

  set(cache "$ENV{XDG_CACHE_HOME}")
  if(NOT cache)
    set(cache "$ENV{HOME}/.cache")
  endif()
  # setup.sh writes this file last, so a cut-off installation has none, and points the folder at
  # the variant that it has made ready.
  set(marker "${cache}/ddp/torch-${DDP_TORCH_WHEEL}/torch-dir")
  if(EXISTS "${marker}")
    file(STRINGS "${marker}" torch_dir LIMIT_COUNT 1)
    list(APPEND candidates "${torch_dir}")
  endif()

  foreach(candidate IN LISTS candidates)
    if(EXISTS "${candidate}/TorchConfig.cmake")
      set(${result} "${candidate}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${result} "" PARENT_SCOPE)
endfunction()

function(ddp_read_torch_version torch_dir result)
  include("${torch_dir}/TorchConfigVersion.cmake")
  set(${result} "${PACKAGE_VERSION}" PARENT_SCOPE)
endfunction()

function(ddp_refuse_old_torch)
  if(Torch_VERSION AND Torch_VERSION VERSION_LESS DDP_TORCH_MINIMUM)
    message(FATAL_ERROR "LibTorch: expected version ${DDP_TORCH_MINIMUM} or newer, got "
      "${Torch_VERSION} in ${Torch_DIR}.")
  endif()
endfunction()

# 17 or 20: the oldest C++ that the headers of the LibTorch in `prefix` compile as. They refuse others.
function(ddp_read_torch_standard prefix result)
  set(refused "")
  if(EXISTS "${prefix}/include/ATen/ATen.h")
    file(STRINGS "${prefix}/include/ATen/ATen.h" refused REGEX "__cplusplus < 202002L" LIMIT_COUNT 1)
  endif()
  if(refused)
    set(${result} 20 PARENT_SCOPE)
  else()
    set(${result} 17 PARENT_SCOPE)
  endif()
endfunction()

# Why the compiler that LibTorch's package makes CMake try compiles nothing, or "": where that trial fails, the whole
# configuration ends. Tried as CMake does it, because it may refuse the C++ compiler, or lack its headers.
function(ddp_nvcc_fault result)
  set(${result} "" PARENT_SCOPE)
  if(CMAKE_CUDA_COMPILER_LOADED)
    return()
  endif()
  set(compiler "${CUDAToolkit_NVCC_EXECUTABLE}")
  set(options "")
  if(CMAKE_CUDA_COMPILER)
    set(compiler "${CMAKE_CUDA_COMPILER}")
  elseif(DEFINED ENV{CUDACXX})
    get_filename_component(compiler "$ENV{CUDACXX}" PROGRAM PROGRAM_ARGS options)
  endif()
  set(flags "${CMAKE_CUDA_FLAGS}")
  if(NOT flags)
    set(flags "$ENV{CUDAFLAGS}")
  endif()
  separate_arguments(options UNIX_COMMAND "${options} ${flags}")
  set(host "")
  if(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    set(host "${CMAKE_CXX_COMPILER}") # LibTorch's package chooses it
  endif()
  foreach(chosen IN ITEMS "$ENV{CUDAHOSTCXX}" "${CMAKE_CUDA_HOST_COMPILER}")
    if(chosen)
      set(host "${chosen}")
    endif()
  endforeach()
  if(host)
    list(APPEND options "-ccbin=${host}")
  endif()
  set(command "${compiler}" ${options})
  if(DDP_TRIED_NVCC STREQUAL "${command}")
    return()
  endif()
  set(source "${CMAKE_BINARY_DIR}/CMakeFiles/ddp_uses_nvcc.cu")
  file(WRITE "${source}" "int main() { return 0; }\n")
  execute_process(COMMAND ${command} -c "${source}" -o "${source}.o"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(status EQUAL 0)
    set(DDP_TRIED_NVCC "${command}" CACHE INTERNAL "The CUDA compiler that compiled a program, with its options")
    return()
  endif()
  string(REGEX MATCH "[^\n]*(error|fatal|cannot|No such|nsupported)[^\n]*" why "${output}")
  set(${result} "${compiler} compiles no program (${why} ${status}): name another one by CUDACXX, or its C++ compiler by \
CUDAHOSTCXX" PARENT_SCOPE)
endfunction()

# Why the CUDA variant of the LibTorch in `prefix` cannot be used here; "" when it can.
# A macro, because find_package(CUDAToolkit) is wanted in the caller's scope.
macro(ddp_why_no_cuda prefix result)
  set(${result} "")
  find_library(DDP_SYSTEM_NCCL NAMES libnccl.so.2 DOC "NCCL, for a LibTorch that comes without its own")
  mark_as_advanced(DDP_SYSTEM_NCCL)
  if(NOT EXISTS "${prefix}/lib/libtorch_cuda.so")
    set(${result} "this LibTorch is a CPU build")
  elseif(EXISTS "${prefix}/__init__.py" AND NOT EXISTS "${prefix}/../nvidia/nccl/lib/libnccl.so.2"
      AND NOT DDP_SYSTEM_NCCL)
    set(${result} "the torch wheel was installed without the nvidia wheels it needs on a GPU")
  else()
    file(STRINGS "${prefix}/lib/libc10_cuda.so" ddp_cudart REGEX "^libcudart.*\\.so\\.[0-9]+$")
    string(REGEX MATCH "[0-9]+$" ddp_cuda_major "${ddp_cudart}")
    find_package(CUDAToolkit QUIET)
    if(NOT CUDAToolkit_FOUND OR NOT CUDAToolkit_NVCC_EXECUTABLE)
      set(${result} "no CUDA toolkit was found (looked for nvcc; set CUDAToolkit_ROOT)")
    elseif(NOT CUDAToolkit_VERSION_MAJOR EQUAL ddp_cuda_major)
      string(CONCAT ${result} "this LibTorch needs a CUDA toolkit ${ddp_cuda_major}, and "
        "${CUDAToolkit_VERSION} was found")
    else()
      ddp_nvcc_fault(${result})
    endif()
  endif()
endmacro()

# The CPU part of a CUDA build of LibTorch, as its own Caffe2Targets.cmake describes it. The
# CUDA runtime and CUPTI that libtorch_cpu.so loads are found through that library's own rpath.
function(ddp_import_torch_cpu prefix)
  set(includes "${prefix}/include" "${prefix}/include/torch/csrc/api/include")
  foreach(name IN ITEMS c10 torch_cpu)
    if(NOT EXISTS "${prefix}/lib/lib${name}.so")
      message(FATAL_ERROR "LibTorch in ${prefix}: expected lib/lib${name}.so, found no such file. "
        "Install LibTorch again; scripts/setup.sh does it for its own.")
    endif()
    add_library(${name} SHARED IMPORTED GLOBAL)
    set_target_properties(${name} PROPERTIES
      IMPORTED_LOCATION "${prefix}/lib/lib${name}.so"
      IMPORTED_SONAME "lib${name}.so"
      INTERFACE_INCLUDE_DIRECTORIES "${includes}")
  endforeach()
  set_target_properties(torch_cpu PROPERTIES
    INTERFACE_COMPILE_DEFINITIONS "USE_DISTRIBUTED;USE_C10D_GLOO;USE_RPC;USE_TENSORPIPE"
    INTERFACE_LINK_LIBRARIES c10)
  # Kernels register themselves when torch_cpu is loaded, so the linker must keep it even where
  # none of its symbols is used.
  add_library(torch INTERFACE IMPORTED GLOBAL)
  target_link_libraries(torch INTERFACE
    "-Wl,--push-state,--no-as-needed" torch_cpu "-Wl,--pop-state")
endfunction()

if(NOT TARGET torch)
  # A plain variable on purpose: cached, it would outlive a changed environment or a new wheel.
  ddp_locate_torch(Torch_DIR)
  if(NOT Torch_DIR)
    set(ddp_needs "")
    set(ddp_itself "")
    if(DDP_TORCH_BUILT_WITH)
      set(ddp_itself "${PACKAGE_PREFIX_DIR};") # a package is found by that list, too
      set(ddp_needs " This ddp was built with LibTorch ${DDP_TORCH_BUILT_WITH} and needs that version.")
    endif()
    message(FATAL_ERROR "LibTorch was not found.${ddp_needs} One of these gives it:\n"
      "  \"-DCMAKE_PREFIX_PATH=${ddp_itself}/path/to/libtorch\"\n"
      "                                               an unpacked LibTorch zip\n"
      "  \"-DCMAKE_PREFIX_PATH=${ddp_itself}$(python3 -c 'import torch; print(torch.utils.cmake_prefix_path)')\"\n"
      "                                               a wheel in one's own Python\n"
      "  scripts/setup.sh                             of ddp's sources: a wheel in a cache folder")
  endif()
  file(REAL_PATH "${Torch_DIR}" Torch_DIR) # what lies beside a wheel does not lie beside a link to it
  ddp_read_torch_version("${Torch_DIR}" Torch_VERSION)
  ddp_refuse_old_torch()

  get_filename_component(ddp_torch_prefix "${Torch_DIR}/../../.." ABSOLUTE)
  if(DDP_WITH_CUDA STREQUAL "OFF")
    set(ddp_no_cuda "DDP_WITH_CUDA is OFF")
  else()
    ddp_why_no_cuda("${ddp_torch_prefix}" ddp_no_cuda)
    if(DDP_WITH_CUDA STREQUAL "ON" AND ddp_no_cuda)
      message(FATAL_ERROR "DDP_WITH_CUDA is ON, but ${ddp_no_cuda}. LibTorch: ${ddp_torch_prefix}")
    endif()
  endif()

  if(ddp_no_cuda AND EXISTS "${ddp_torch_prefix}/lib/libtorch_cuda.so")
    ddp_import_torch_cpu("${ddp_torch_prefix}")
  else()
    if(NOT ddp_no_cuda)
      # LibTorch's package probes for a GPU unless it is told which to compile for, and with
      # nvcc 13 and CMake 3.25 the probe fails. Nothing of ours is compiled by nvcc.
      if(NOT DEFINED TORCH_CUDA_ARCH_LIST AND NOT DEFINED ENV{TORCH_CUDA_ARCH_LIST})
        set(TORCH_CUDA_ARCH_LIST 9.0)
      endif()
      # Otherwise enable_language(CUDA), which that package calls, finds only an nvcc on PATH.
      if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
        set(CMAKE_CUDA_COMPILER "${CUDAToolkit_NVCC_EXECUTABLE}")
      endif()
    endif()
    find_package(Torch REQUIRED CONFIG GLOBAL PATHS "${Torch_DIR}" NO_DEFAULT_PATH)
    # The wheel's own NCCL, and not an older one in the toolkit's folder, where GNU's linker looks
    # for it first.
    set(ddp_wheel_nccl "${ddp_torch_prefix}/../nvidia/nccl/lib")
    if(EXISTS "${ddp_wheel_nccl}")
      set_property(TARGET torch APPEND PROPERTY
        INTERFACE_LINK_OPTIONS "LINKER:-rpath-link,${ddp_wheel_nccl}")
    endif()
  endif()

  # LibTorch's own package does not hand this on to what uses it, before 2.15.
  ddp_read_torch_standard("${ddp_torch_prefix}" ddp_torch_standard)
  if(TARGET torch)
    set_property(TARGET torch APPEND PROPERTY
      INTERFACE_COMPILE_FEATURES cxx_std_${ddp_torch_standard})
  endif()

  set(ddp_variant CUDA)
  if(ddp_no_cuda)
    set(ddp_variant "CPU only: ${ddp_no_cuda}")
  endif()
  message(STATUS "LibTorch ${Torch_VERSION} in ${ddp_torch_prefix} (${ddp_variant})")
endif()

ddp_refuse_old_torch() # one that the enclosing project found

set(DDP_CUDA OFF)
set(DDP_HAS_NCCL OFF)
if(TARGET torch_cuda)
  set(DDP_CUDA ON)
  # The wheel's own NCCL first, also before one in CMAKE_PREFIX_PATH: that is the one that
  # libtorch_cuda.so loads, and c10d's headers hold structs whose size differs between releases.
  find_path(DDP_NCCL_INCLUDE_DIR nccl.h
    PATHS "${Torch_DIR}/../../../../nvidia/nccl/include" NO_DEFAULT_PATH
    DOC "The folder of nccl.h")
  find_path(DDP_NCCL_INCLUDE_DIR nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  if(DDP_NCCL_INCLUDE_DIR)
    set(DDP_HAS_NCCL ON)
    if(NOT TARGET ddp_nccl)
      add_library(ddp_nccl INTERFACE IMPORTED GLOBAL)
      target_include_directories(ddp_nccl INTERFACE "${DDP_NCCL_INCLUDE_DIR}")
    endif()
  else()
    message(STATUS "nccl.h was not found: the NCCL backend is left out")
  endif()
endif()
