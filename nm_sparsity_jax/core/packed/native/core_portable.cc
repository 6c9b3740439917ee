#define NM_NAME portable
#define NM_TEXT "portable"
#define NM_WIDTH 4
#define NM_SHUFFLE 0
#include "core.h"
