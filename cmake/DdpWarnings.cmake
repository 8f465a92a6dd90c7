# The warnings every file of this project compiles under. Never exported: they are not the
# business of the projects that use ddp.
add_library(ddp_warnings INTERFACE)
target_compile_options(ddp_warnings INTERFACE
  -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
  $<$<BOOL:${DDP_WERROR}>:-Werror>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # It sees a std::vector<bool>, of which autograd's headers reserve room, written beyond its end.
  target_compile_options(ddp_warnings INTERFACE -Wno-array-bounds -Wno-stringop-overflow)
endif()
