# Builds a program of tests/consumer with ddp's sources, by FetchContent and then, in the same build folder, by
# add_subdirectory. It uses one component, so no other is compiled; the objects of libddp.so would be the same.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
file(REMOVE_RECURSE "${WORK_DIR}")
set(build "${WORK_DIR}/build")

function(use_sources from shared)
  run(${as_newcomer} ${CMAKE_COMMAND} -S "${SOURCE_DIR}/tests/consumer" -B "${build}" ${settings}
    "-DCMAKE_CXX_COMPILER=${other_compiler}" -DCMAKE_CXX_STANDARD=${oldest_standard} -DDDP_FROM=${from}
    "-DDDP_SOURCE=${SOURCE_DIR}" "-DTorch_DIR=${TORCH_DIR}" "-DDDP_WITH_CUDA=${WITH_CUDA}" -DDDP_WITH_MPI=OFF
    -DBUILD_SHARED_LIBS=${shared} -DALONE=core -DCMAKE_UNITY_BUILD_BATCH_SIZE=40)
endfunction()

use_sources(FETCH OFF)
run(${CMAKE_COMMAND} --build "${build}" --config "${CONFIG}" --target core_alone ddprun)
run(${CMAKE_CTEST_COMMAND} --test-dir "${build}" -C "${CONFIG}" --output-on-failure -R core_alone)
if(NOT output MATCHES "tests passed, 0 tests failed out of 1\n")
  message(FATAL_ERROR "expected core_alone to pass, got:\n${output}")
endif()
file(GLOB libraries RELATIVE "${build}/_deps/ddp-build" "${build}/_deps/ddp-build/libddp*")
if(NOT libraries STREQUAL "libddp_core.a")
  message(FATAL_ERROR "expected the one component that the program uses, got ${libraries}")
endif()

# Compiling takes a minute: that flags differ from one to the other should be seen.
use_sources(SUBDIRECTORY ON)
run(${CMAKE_COMMAND} --build "${build}" --config "${CONFIG}" --target
  ddp_room_comm ddp_room_shard ddp_room_reducer ddp_room_sampler ddp_room_ddp)
if(output MATCHES "Building CXX")
  message(FATAL_ERROR "expected libddp.so to take the objects of libddp_core.a, got:\n${output}")
endif()
run(${CMAKE_COMMAND} --build "${build}" --config "${CONFIG}" -- -n)
if(NOT output MATCHES "libddp\\.so" OR output MATCHES "ddp_bench|mnist|_test" OR output MATCHES "libddp_core")
  message(FATAL_ERROR "expected of a subproject the library, ddprun and no other programs, got:\n${output}")
endif()
