# Builds TARGET in BUILD_DIR and expects it to fail with one error a line of `not_wrappable`, and one of `not_comparable`.
execute_process(
  COMMAND ${CMAKE_COMMAND} --build ${BUILD_DIR} --target ${TARGET} --config ${CONFIG}
  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(status EQUAL 0)
  message(FATAL_ERROR "expected ${TARGET} not to compile")
endif()
function(expect count text)
  string(REGEX MATCHALL "${text}" found "${output}")
  list(LENGTH found times)
  if(NOT times EQUAL count)
    message(FATAL_ERROR "expected \"${text}\" ${count} times, got it ${times} times in\n${output}")
  endif()
endfunction()
# Clang says of each object, too, that no constructor fits.
string(REGEX REPLACE "error: no matching constructor[^\n]*" "" output "${output}")
expect(7 "error: ")
expect(4 "error: [^\n]*DistributedDataParallel: wrap a std::shared_ptr to the module")
expect(1 "error: [^\n]*check_dataset\\(\\) takes items of [^\n]* a struct to ")
expect(1 "error: [^\n]*DistributedDataParallel: an AnyModule hides its forward")
expect(1 "error: [^\n]*DistributedDataParallel: the wrapped module has no forward")
