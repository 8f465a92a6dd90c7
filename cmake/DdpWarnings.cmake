# The warnings every file of this project compiles under. Never exported: they are not the
# business of the projects that use ddp.
add_library(ddp_warnings INTERFACE)
target_compile_options(ddp_warnings INTERFACE
  -Wall -Wextra -Wnon-virtual-dtor -Woverloaded-virtual
  $<$<BOOL:${DDP_WERROR}>:-Werror>)
