#define NM_NAME avx2
#define NM_TEXT "avx2"
#define NM_WIDTH 8
#ifdef __clang__  // which has no shuffle by a variable
#define NM_SHUFFLE 0
#else
#define NM_SHUFFLE 1
#endif
#include "core.h"
