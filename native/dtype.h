/* Element types, numbered the same in C and in Python. */
#ifndef ML_DTYPE_H
#define ML_DTYPE_H

/* [cffi] */
typedef enum { ML_FP32 = 1, ML_BF16 = 2, ML_INT8 = 3 } ml_dtype;
/* [/cffi] */

#endif
