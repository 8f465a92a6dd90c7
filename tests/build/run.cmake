# Helpers of the tests of this folder. The caller defines GENERATOR, CONFIG, CXX, CLANG (or ""),
# LAUNCHER, SANITIZE, BATCH, TORCH_DIR, SOURCE_DIR, and a WORK_DIR of the test's own.

function(try)
  execute_process(COMMAND ${ARGV} RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  list(JOIN ARGV " " command)
  set(status "${status}" PARENT_SCOPE)
  set(output "${output}" PARENT_SCOPE)
  set(command "${command}" PARENT_SCOPE)
endfunction()

function(run)
  try(${ARGV})
  if(NOT status EQUAL 0)
    message("${output}") # separate from the error, whose text CMake would reflow
    message(FATAL_ERROR "${command}: expected exit status 0, got ${status}; its output is above")
  endif()
  set(output "${output}" PARENT_SCOPE)
endfunction()

# A user who has never run setup.sh, and whose environment names no LibTorch.
set(as_newcomer ${CMAKE_COMMAND} -E env "HOME=${WORK_DIR}" --unset=XDG_CACHE_HOME
  --unset=Torch_DIR --unset=Torch_ROOT)
unset(ENV{CMAKE_PREFIX_PATH})
set(sanitize "")
if(SANITIZE)
  set(sanitize "-DCMAKE_CXX_FLAGS=-fsanitize=${SANITIZE}")
endif()
set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} "${LAUNCHER}") # a list, which an argument would split
# Unoptimized: the programs run few steps, and optimizing would take half of the test.
set(settings -G "${GENERATOR}" "-DCMAKE_BUILD_TYPE=${CONFIG}" "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG"
  "-DCMAKE_CXX_COMPILER=${CXX}" ${sanitize})

# Not the one of the build, where there are two.
set(other_compiler ${CXX} ${CLANG})
list(GET other_compiler -1 other_compiler)

include("${TORCH_DIR}/TorchConfigVersion.cmake")
set(standards 17 20)
if(PACKAGE_VERSION VERSION_GREATER_EQUAL 2.14)
  set(standards 20) # LibTorch's headers compile as nothing older
endif()
list(GET standards 0 oldest_standard)
list(GET standards -1 newest_standard)

# use_as_consumer(<name> <compiler> <standard> <arguments>...): configures tests/consumer in
# WORK_DIR/<name>, builds it as that C++, and runs it alone and on two ranks, with -DOVER_MPI=ON under mpirun, and
# the programs of the components that -DALONE= names. Stores what the first two steps print in `configured` and `built`.
function(use_as_consumer name compiler standard)
  run(${as_newcomer} ${CMAKE_COMMAND} -S "${SOURCE_DIR}/tests/consumer" -B "${WORK_DIR}/${name}"
    ${settings} "-DCMAKE_CXX_COMPILER=${compiler}" -DCMAKE_CXX_STANDARD=${standard} ${ARGN})
  set(configured "${output}" PARENT_SCOPE)
  run(${CMAKE_COMMAND} --build "${WORK_DIR}/${name}" --config "${CONFIG}")
  set(built "${output}" PARENT_SCOPE)
  run(${CMAKE_CTEST_COMMAND} --test-dir "${WORK_DIR}/${name}" -C "${CONFIG}" --output-on-failure)
  set(tests 2)
  if("${ARGN}" MATCHES "-DOVER_MPI=ON")
    math(EXPR tests "${tests} + 1")
  endif()
  if("${ARGN}" MATCHES "-DALONE=training")
    math(EXPR tests "${tests} + 3")
  endif()
  if(NOT output MATCHES "tests passed, 0 tests failed out of ${tests}\n")
    message(FATAL_ERROR "${name}: expected its ${tests} tests to pass, got:\n${output}")
  endif()
endfunction()

# expect_no_configuration(<name> <words> <arguments>...): configures a project in WORK_DIR/<name>, which must fail
# and say so.
function(expect_no_configuration name expected)
  try(${as_newcomer} ${CMAKE_COMMAND} -B "${WORK_DIR}/${name}" ${settings} ${ARGN})
  string(REGEX REPLACE "[ \n]+" " " words "${output}")
  if(status EQUAL 0 OR NOT words MATCHES "${expected}")
    message(FATAL_ERROR "${name}: expected no configuration and \"${expected}\", got ${status}:\n${output}")
  endif()
endfunction()
