// Turns C++ exceptions into messages. For the shim's own files only.
#pragma once
#include "shim.h"

#include <exception>
#include <string>

#include <c10/util/Exception.h>

inline Message message(const std::string &text) { return sw_message_new(text.data(), text.size()); }

template <typename Body> Message guarded(Body body) {
  try {
    body();
    return nullptr;
  } catch (const c10::Error &error) {
    return message(error.what_without_backtrace());
  } catch (const std::exception &error) {
    return message(error.what());
  } catch (...) {
    return message("an exception that is not a std::exception");
  }
}
