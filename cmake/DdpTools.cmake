# ccache and mold, where present and unless the user chose otherwise. A cached preset cannot
# look for programs, so this is done here.

option(DDP_USE_CCACHE "Compile through ccache where it is installed" ${PROJECT_IS_TOP_LEVEL})
option(DDP_USE_MOLD "Link with mold where it is installed" ${PROJECT_IS_TOP_LEVEL})

if(DDP_USE_CCACHE AND NOT DEFINED CMAKE_CXX_COMPILER_LAUNCHER)
  find_program(DDP_CCACHE ccache)
  mark_as_advanced(DDP_CCACHE)
  if(DDP_CCACHE)
    # Without this sloppiness ccache refuses every file that uses a precompiled header.
    set(CMAKE_CXX_COMPILER_LAUNCHER
      ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${DDP_CCACHE})
  endif()
endif()

if(DDP_USE_MOLD)
  find_program(DDP_MOLD mold)
  mark_as_advanced(DDP_MOLD)
  if(DDP_MOLD)
    include(CheckLinkerFlag)
    check_linker_flag(CXX -fuse-ld=mold DDP_COMPILER_TAKES_MOLD)
    if(DDP_COMPILER_TAKES_MOLD)
      add_link_options(-fuse-ld=mold)
    endif()
  endif()
endif()
