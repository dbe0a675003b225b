// What clang's checks of the language call: indices beyond a declared array (in thread memory, too), division by zero.
#include "runtime.h"

namespace {

// The layouts are compiler-rt's.
struct Location {
  const char* file;
  u32 line, column;
};
struct TypeName {
  u16 kind, info;
  char name[1];
};
struct IndexData {
  Location where;
  const TypeName *array, *index;
};

void append(char*& to, const char* from) {
  for (u32 i = 0; from[i] && i < 100; i++) *to++ = from[i];
  *to = 0;
}

[[noreturn]] void language_fault(Fault kind, const char* note, const Location& where) {
  fail(kind, note, {(i32)where.line, where.file});
}

}  // namespace

extern "C" {

void __ubsan_handle_out_of_bounds(IndexData* data, u64 index) {
  char note[256], digits[24];
  char* to = note;
  append(to, "index ");
  char* d = digits + 23;
  *d = 0;
  const bool negative = (i64)index < 0;
  for (u64 n = negative ? -index : index; n || !*d; n /= 10) *--d = (char)('0' + n % 10);
  if (negative) *--d = '-';
  append(to, d);
  append(to, " of an array of type ");
  append(to, data->array->name);
  language_fault(Fault::out_of_bounds, note, data->where);
}

void __ubsan_handle_divrem_overflow(Location* where, u64, u64) {
  language_fault(Fault::arithmetic, "an integer division by zero", *where);
}

}  // extern "C"
