#define NM_NAME avx512
#define NM_TEXT "avx512"
#define NM_WIDTH 16
#ifdef __clang__  // which has no shuffle by a variable
#define NM_SHUFFLE 0
#else
#define NM_SHUFFLE 1
#endif
#include "core.h"
