# Options of our own code; never exported to users.
add_library(mla_options INTERFACE)
target_compile_features(mla_options INTERFACE cxx_std_20)
target_compile_options(mla_options INTERFACE
  $<$<COMPILE_LANGUAGE:C,CXX>:-Wall -Wextra -Wpedantic -Wshadow -Werror>)
if(MLA_SANITIZE)
  target_compile_options(mla_options INTERFACE
    $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=address,undefined -fno-sanitize-recover=all
      -fno-omit-frame-pointer>)
  target_link_options(mla_options INTERFACE -fsanitize=address,undefined)
endif()
