# ddp_use_pch(<target> <of>): lets a target share a precompiled header, C10D or TORCH.
#
#   C10D   c10d's ProcessGroup, with ATen: for the library, and for programs that include single headers
#   TORCH  torch/torch.h: for programs that include all of it, as users do
#
# Targets after ddp_compile_fast share a third one, where DDP_FAST_COMPILER has a compiler of theirs: FAST, of
# torch/torch.h.
#
# LibTorch's headers take 7 to 15 s to parse, so nearly all of a build is that. A compilation that loads
# C10D still spends 1.5 s on templates which the headers ask for, one that loads TORCH 4 s.
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
  ddp_add_pch(C10D torch/csrc/distributed/c10d/ProcessGroup.hpp torch)
  set_target_properties(ddp_pch_c10d PROPERTIES POSITION_INDEPENDENT_CODE ON)
  if(DDP_BUILD_TESTS OR DDP_BUILD_EXAMPLES OR DDP_BUILD_BENCHMARKS)
    if(DDP_FAST_CXX)
      ddp_add_pch(FAST torch/torch.h ddp::core)
      ddp_compile_fast(ddp_pch_fast)
      # With the templates' instances, and without times, for which ccache would refuse it.
      target_compile_options(ddp_pch_fast PRIVATE
        "SHELL:-Xclang -fpch-instantiate-templates" "SHELL:-Xclang -fno-pch-timestamp")
    else()
      ddp_add_pch(TORCH torch/torch.h ddp::core)
    endif()
  endif()
endif()

function(ddp_use_pch target of)
  if(NOT DDP_PCH)
    return()
  endif()
  get_target_property(type ${target} TYPE)
  get_target_property(fast ${target} DDP_COMPILED_FAST)
  if(fast)
    target_precompile_headers(${target} REUSE_FROM ddp_pch_fast)
    return()
  endif()
  string(TOLOWER ddp_pch_${of} name)
  target_precompile_headers(${target} REUSE_FROM ${name})
  if(of STREQUAL "C10D" AND type STREQUAL "EXECUTABLE")
    # As the library compiles; an executable's POSITION_INDEPENDENT_CODE would mean -fPIE.
    target_compile_options(${target} PRIVATE -fPIC)
  elseif(of STREQUAL "C10D")
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  endif()
endfunction()
