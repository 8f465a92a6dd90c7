# Builds tests/consumer with ddp's sources: FROM is SUBDIRECTORY or FETCH, COMPILER compiles both.
include("${CMAKE_CURRENT_LIST_DIR}/run.cmake")
file(REMOVE_RECURSE "${WORK_DIR}")
use_as_consumer(build "${COMPILER}" ${oldest_standard} -DDDP_FROM=${FROM} "-DDDP_SOURCE=${SOURCE_DIR}"
  "-DTorch_DIR=${TORCH_DIR}" "-DDDP_WITH_CUDA=${WITH_CUDA}" -DBUILD_SHARED_LIBS=${SHARED})

# As a part of another project, ddp builds only the library and ddprun, and installs nothing.
file(GLOB_RECURSE programs "${WORK_DIR}/build/*ddp_bench" "${WORK_DIR}/build/*mnist" "${WORK_DIR}/build/*_test")
if(programs)
  message(FATAL_ERROR "expected no programs but ddprun of a subproject, got ${programs}")
endif()
