# ddp_use_pch(<target> <of>): lets a target share a precompiled header, of ROOMS or PROGRAMS.
#
# LibTorch's headers take 10 s to parse and more, so nearly all of a build is that. There is one
# precompiled header for the library and one for tests and examples: torch/torch.h would cost each
# file of the library 4 s for templates that it does not use.
# GCC takes a precompiled header only under the flags it was made with: a target that uses one must
# compile as its ddp_pch_* does (-Winvalid-pch, which CMake adds, says when one does not). Sources
# include what they need all the same; DDP_PCH=OFF shows whether they do.
function(ddp_add_pch of header libraries)
  string(TOLOWER ddp_pch_${of} name)
  set(anchor ${PROJECT_BINARY_DIR}/${name}.cpp)
  file(GENERATE OUTPUT ${anchor} CONTENT "// A target with a precompiled header needs a source.\n")
  add_library(${name} OBJECT ${anchor})
  target_compile_features(${name} PRIVATE cxx_std_17)
  target_link_libraries(${name} PRIVATE ${libraries} ddp_warnings)
  target_precompile_headers(${name} PRIVATE <${header}>)
endfunction()

if(DDP_PCH)
  ddp_add_pch(ROOMS torch/csrc/distributed/c10d/ProcessGroup.hpp torch)
  set_target_properties(ddp_pch_rooms PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(DDP_BUILD_TESTS OR DDP_BUILD_EXAMPLES OR DDP_BUILD_BENCHMARKS)
    ddp_add_pch(PROGRAMS torch/torch.h ddp::ddp)
  endif()
endif()

function(ddp_use_pch target of)
  if(DDP_PCH)
    string(TOLOWER ddp_pch_${of} name)
    target_precompile_headers(${target} REUSE_FROM ${name})
  endif()
endfunction()
