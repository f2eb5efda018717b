//! Which vector instructions this machine has, and code compiled for them. A kernel is a plain loop in a
//! closure marked `#[inline(always)]`; it is inlined here into one function per instruction set, where the
//! compiler may use that set's registers.
//!
//! By hand, because a crate that does this (`pulp`) takes the closure by value, and the shim that calls it
//! is not inlined: the loop then runs without the instructions it was meant for, at a tenth of the speed.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum InstructionSet {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Plain,
}

impl InstructionSet {
    pub(super) fn detect() -> InstructionSet {
        #[cfg(target_arch = "x86_64")]
        {
            use std::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma") && has!("bmi1") && has!("bmi2");
            let wide = has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl");
            if avx2 && wide {
                return InstructionSet::Avx512;
            }
            if avx2 {
                return InstructionSet::Avx2;
            }
        }
        InstructionSet::Plain
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => "AVX2",
            InstructionSet::Plain => "plain",
        }
    }

    /// Runs a kernel with these instructions. Mark the closure `#[inline(always)]`.
    #[inline(always)]
    pub(super) fn dispatch<R>(self, kernel: impl FnMut() -> R) -> R {
        match self {
            // SAFETY: only `detect` makes this value, where the processor has the instructions.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512 => unsafe { with_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx2 => unsafe { with_avx2(kernel) },
            InstructionSet::Plain => plain(kernel),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi1,bmi2")]
fn with_avx512<R>(mut kernel: impl FnMut() -> R) -> R {
    kernel()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,bmi1,bmi2")]
fn with_avx2<R>(mut kernel: impl FnMut() -> R) -> R {
    kernel()
}

fn plain<R>(mut kernel: impl FnMut() -> R) -> R {
    kernel()
}
