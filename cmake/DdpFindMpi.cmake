# ddp_find_mpi(<result>): finds an MPI for C++ programs, and sets <result> to why it cannot, or "".
#
# Gives the target ddp_mpi_library, and sets DDP_MPI_VERSION to the first line of what that MPI says of itself.
# Handles are pointers in Open MPI and numbers in MPICH, so a library works with the MPI it was built with only.
function(ddp_find_mpi result)
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
