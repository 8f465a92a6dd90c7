# ddp_find_mpi(<result>): finds an MPI for C++ programs, and sets <result> to why it cannot, or "".
#
# Gives the target ddp_mpi_library, and sets DDP_MPI_VERSION to the first line of what that MPI says of itself.
# Handles are pointers in Open MPI and numbers in MPICH, so a library works with the MPI it was built with only.
function(ddp_find_mpi result)
  ddp_find_mpi_fault(fault)
  if(fault)
    set(${result} "${fault}" PARENT_SCOPE)
    return()
  endif()
  set(MPI_CXX_SKIP_MPICXX ON)
  set(MPI_DETERMINE_LIBRARY_VERSION ON)
  find_package(MPI QUIET COMPONENTS CXX)
  if(NOT MPI_CXX_FOUND)
    set(${result} "no MPI was found (looked for mpicxx; set MPI_HOME, or MPI_CXX_COMPILER)" PARENT_SCOPE)
    return()
  endif()
  if(NOT TARGET ddp_mpi_library)
    add_library(ddp_mpi_library INTERFACE IMPORTED GLOBAL) # not exported: each project finds its MPI
    target_compile_definitions(ddp_mpi_library INTERFACE OMPI_SKIP_MPICXX=1 MPICH_SKIP_MPICXX=1)
    target_include_directories(ddp_mpi_library SYSTEM INTERFACE ${MPI_CXX_INCLUDE_DIRS})
    # Without the C++ bindings, which MPI 3 removed.
    set(libraries ${MPI_CXX_LIBRARIES})
    list(FILTER libraries EXCLUDE REGEX "mpi_cxx|mpicxx")
    target_link_libraries(ddp_mpi_library INTERFACE ${libraries})
  endif()
  set(version "${MPI_CXX_LIBRARY_VERSION_STRING}")
  string(REGEX REPLACE "[\n,;].*" "" version "${version}")
  string(REPLACE "\t" " " version "${version}")
  set(DDP_MPI_VERSION "${version}" PARENT_SCOPE)
  set(${result} "" PARENT_SCOPE)
endfunction()

# Sets <result> to why the wrapper that FindMPI would ask does not compile, or "". FindMPI takes what it prints for
# granted, and its own trials end the whole configuration where a folder of headers is not there.
function(ddp_find_mpi_fault result)
  set(${result} "" PARENT_SCOPE)
  set(wrapper "${MPI_CXX_COMPILER}")
  if(NOT wrapper)
    find_program(wrapper NAMES mpicxx mpiCC mpic++ HINTS ${MPI_HOME} ENV MPI_HOME PATH_SUFFIXES bin NO_CACHE)
  endif()
  if(NOT wrapper OR CMAKE_CROSSCOMPILING)
    return()
  endif()
  set(source "${CMAKE_BINARY_DIR}/CMakeFiles/ddp_uses_mpi.cpp")
  file(WRITE "${source}" "#include <mpi.h>\nint main() { return 0; }\n")
  execute_process(COMMAND "${wrapper}" -Werror=missing-include-dirs -DOMPI_SKIP_MPICXX=1 -DMPICH_SKIP_MPICXX=1 -o "${source}.out" "${source}"
    RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    string(REGEX MATCH "[^\n]*(error|cannot|No such)[^\n]*" why "${output}")
    set(${result} "${wrapper} compiles no program with mpi.h (${why}): install MPI's headers, or name another one by \
MPI_CXX_COMPILER" PARENT_SCOPE)
  endif()
endfunction()
