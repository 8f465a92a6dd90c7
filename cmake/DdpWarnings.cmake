# The warnings every file of this project compiles under. Never exported: they are not the
# business of the projects that use ddp.
add_library(ddp_warnings INTERFACE)
target_compile_options(ddp_warnings INTERFACE
  -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
  # GCC 13 sees std::vector<bool>, of which autograd's headers reserve room, written beyond its end.
  $<$<AND:$<CXX_COMPILER_ID:GNU>,$<VERSION_GREATER_EQUAL:$<CXX_COMPILER_VERSION>,13>>:-Wno-array-bounds>
  $<$<BOOL:${DDP_WERROR}>:-Werror>)
