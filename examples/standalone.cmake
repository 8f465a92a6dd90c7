# Defines, for a build of the examples alone, what ddp's own build gives them.
if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release)
endif()
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/bin)
add_library(ddp_warnings INTERFACE)

# Shortens a build with many programs. Here there are only a few.
function(ddp_use_pch)
endfunction()
function(ddp_compile_fast)
endfunction()
function(ddp_command_line_source)
endfunction()
