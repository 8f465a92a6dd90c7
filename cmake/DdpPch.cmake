# ddp_use_pch(<target>): lets a test or example program share one precompiled torch/torch.h.
#
# Such a header costs half a minute and several hundred MB, so there is exactly one, and it is
# used only where everything includes torch/torch.h; the library keeps its includes light.
# GCC takes a precompiled header only under the flags it was made with: a program that uses it
# must compile as ddp_pch does (-Winvalid-pch, which CMake adds, says when one does not).
if(DDP_PCH)
  set(anchor ${PROJECT_BINARY_DIR}/ddp_pch.cpp)
  file(GENERATE OUTPUT ${anchor} CONTENT "// A target with a precompiled header needs a source.\n")
  add_library(ddp_pch OBJECT ${anchor})
  target_link_libraries(ddp_pch PRIVATE ddp::ddp ddp_warnings)
  target_precompile_headers(ddp_pch PRIVATE <torch/torch.h>)
endif()

function(ddp_use_pch target)
  if(DDP_PCH)
    target_precompile_headers(${target} REUSE_FROM ddp_pch)
  endif()
endfunction()
