# What makes a build shorter: ccache and a fast linker, where present and unless the user chose
# otherwise (a cached preset cannot look for programs), and options of the compiler.

option(DDP_USE_CCACHE "Compile through ccache where it is installed" ${PROJECT_IS_TOP_LEVEL})
option(DDP_USE_FAST_LINKER "Link with mold or lld where one is installed" ${PROJECT_IS_TOP_LEVEL})

if(DDP_USE_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(DDP_CCACHE ccache)
  mark_as_advanced(DDP_CCACHE)
  set(ddp_ccache_status 1)
  if(DDP_CCACHE)
    execute_process(COMMAND "${DDP_CCACHE}" --version RESULT_VARIABLE ddp_ccache_status OUTPUT_QUIET ERROR_QUIET)
    if(NOT ddp_ccache_status EQUAL 0)
      message(STATUS "ccache is left out: ${DDP_CCACHE} --version fails")
    endif()
  endif()
  if(ddp_ccache_status EQUAL 0)
    # Without this sloppiness ccache refuses every file that uses a precompiled header. With the base
    # folder it finds the precompiled headers of another clone, which take the longest.
    set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
      CCACHE_SLOPPINESS=pch_defines,time_macros CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${DDP_CCACHE})
  endif()
endif()

if(DDP_USE_FAST_LINKER)
  include(CheckLinkerFlag)
  foreach(linker IN ITEMS mold lld)
    check_linker_flag(CXX -fuse-ld=${linker} DDP_COMPILER_TAKES_${linker})
    if(DDP_COMPILER_TAKES_${linker})
      add_link_options(-fuse-ld=${linker})
      break()
    endif()
  endforeach()
endif()

# GCC collects garbage whenever its heap has doubled, and a compilation that includes LibTorch's
# headers never has garbage to speak of. The first collection comes at 1 GB (the value is in KiB):
# that takes a fifth off a compilation's time and adds 0.1 GB to its 1.5 GB of memory.
add_compile_options($<$<CXX_COMPILER_ID:GNU>:--param=ggc-min-heapsize=1000000>)

# Clang takes a third of GCC's time for a program that includes torch/torch.h, because its precompiled header
# keeps the templates that LibTorch's headers ask for, and GCC's asks for them again in each compilation.
set(DDP_FAST_COMPILER "" CACHE STRING
  "clang++, to compile programs whose own speed does not matter; empty: the compiler of the library")
if(DDP_FAST_COMPILER AND NOT DDP_SANITIZE) # the runtimes of GCC's and of clang's sanitizers exclude each other
  find_program(DDP_FAST_CXX NAMES ${DDP_FAST_COMPILER} NO_CACHE REQUIRED)
endif()

# ddp_compile_fast(<target>): for programs whose own speed does not matter: tests, small examples. The
# library is optimized as configured; with -O3 these would take half as long again to compile. -Og and
# not -O0, because GCC takes a precompiled header that was made with optimization only with optimization.
# From GCC 13 on, -O3 for x86 sets two options that -Og does not, and they must agree, too.
include(CheckCXXCompilerFlag)
function(ddp_compile_fast target)
  if(DDP_FAST_CXX)
    set_target_properties(${target} PROPERTIES DDP_COMPILED_FAST ON POSITION_INDEPENDENT_CODE ON
      CXX_COMPILER_LAUNCHER
      "${PROJECT_SOURCE_DIR}/cmake/by_compiler.sh;${DDP_FAST_CXX};${CMAKE_CXX_COMPILER_LAUNCHER};--")
    # -fPIC and not an executable's -fPIE: a precompiled header is for one of them.
    target_compile_options(${target} PRIVATE -O0 -fPIC)
    return()
  endif()
  set(options -Og)
  check_cxx_compiler_flag("-munroll-only-small-loops -mvzeroupper" DDP_HAS_OPTIONS_OF_X86)
  if(DDP_HAS_OPTIONS_OF_X86)
    list(APPEND options -munroll-only-small-loops -mvzeroupper)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # Under -Og GCC loses track of values, and says so of its own std::function.
    list(APPEND options -Wno-maybe-uninitialized)
  endif()
  target_compile_options(${target} PRIVATE "$<$<NOT:$<CONFIG:Debug>>:${options}>")
endfunction()

# ddp_command_line_source(<file>): a source that includes CLI11 and nothing of LibTorch. With -O3 its
# templates would take 7 s to compile, for what runs once in a process.
function(ddp_command_line_source file)
  set_source_files_properties(${file} PROPERTIES
    COMPILE_OPTIONS "$<$<NOT:$<CONFIG:Debug>>:-Og>" SKIP_PRECOMPILE_HEADERS ON)
endfunction()
