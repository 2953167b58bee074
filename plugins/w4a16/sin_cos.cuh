// Rotary angles.
#ifndef INK_SIN_COS_CUH
#define INK_SIN_COS_CUH
#include "device.cuh"

// Sine and cosine of a float32 angle >= 0, rounded once from double: the angle is reduced by pi/2
// in two parts (exact enough below 2^30), then polynomials up to |x| = pi/4. Tested to be rounded
// correctly for all positions below 2^18.
INK_DEVICE void sin_cos(float angle, float& sine, float& cosine) {
  const double a = angle, n = rint(a * 0.63661977236758134308);
  double x = fma(-n, 1.5707963267948965580, a);
  x = fma(-n, 6.1232339957367658e-17, x);
  const double y = x * x;
  double s = 1.5896230157654656e-10, c = -1.1359647557788195e-11;
  s = fma(s, y, -2.5052108385441719e-08), c = fma(c, y, 2.0876756987868099e-09);
  s = fma(s, y, 2.7557319223985893e-06), c = fma(c, y, -2.7557319223985888e-07);
  s = fma(s, y, -1.9841269841269841e-04), c = fma(c, y, 2.4801587301587302e-05);
  s = fma(s, y, 8.3333333333333332e-03), c = fma(c, y, -1.3888888888888889e-03);
  s = fma(s, y, -1.6666666666666666e-01), c = fma(c, y, 4.1666666666666664e-02);
  s = fma(s * y, x, x), c = fma(fma(c, y, -0.5), y, 1.0);
  const int quadrant = (int)n & 3;
  const float u = (float)s, v = (float)c;
  sine = quadrant & 1 ? v : u;
  cosine = quadrant & 1 ? u : v;
  if (quadrant & 2) sine = -sine;
  if ((quadrant + 1) & 2) cosine = -cosine;
}

#endif  // INK_SIN_COS_CUH
