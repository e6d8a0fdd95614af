//! Speed at which this host reads memory: the floor of an empty scan.

/// Function that sums all words as fast as one thread can read them.
#[derive(Debug, Clone, Copy)]
pub(super) enum Reader {
    /// 64 bytes per load.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// 32 bytes per load.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// Code of the compiler for the base instruction set.
    Plain,
}

impl Reader {
    /// Returns all readers that this processor supports.
    pub(super) fn all() -> Vec<Self> {
        let mut all = vec![Reader::Plain];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2") {
                all.push(Reader::Avx2);
            }
            if is_x86_feature_detected!("avx512f") {
                all.push(Reader::Avx512);
            }
        }
        all
    }

    /// Returns the sum of `words`.
    pub(super) fn sum(self, words: &[u64]) -> u64 {
        match self {
            // SAFETY: the guard has just checked that the processor has the feature.
            #[cfg(target_arch = "x86_64")]
            Reader::Avx512 if is_x86_feature_detected!("avx512f") => unsafe { sum_avx512(words) },
            // SAFETY: the guard has just checked that the processor has the feature.
            #[cfg(target_arch = "x86_64")]
            Reader::Avx2 if is_x86_feature_detected!("avx2") => unsafe { sum_avx2(words) },
            _ => sum(words),
        }
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_avx512(words: &[u64]) -> u64 {
    sum(words)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn sum_avx2(words: &[u64]) -> u64 {
    sum(words)
}

/// Adds eight vectors of eight words in parallel, so that no addition waits for another one. Begins
/// at a cache line.
#[inline(always)]
fn sum(words: &[u64]) -> u64 {
    let (head, words) = words.split_at(words.as_ptr().align_offset(64).min(words.len()));
    let (vectors, rest) = words.as_chunks::<64>();
    let mut sums = [0_u64; 64];
    for vector in vectors {
        for (sum, word) in sums.iter_mut().zip(vector) {
            *sum = sum.wrapping_add(*word);
        }
    }
    head.iter().chain(rest).chain(&sums).fold(0, |sum, word| sum.wrapping_add(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reader_sums_all_words() {
        let words: Vec<u64> = (0..1000).map(|word| word * word).collect();
        for reader in Reader::all() {
            assert_eq!(reader.sum(&words[3..]), words[3..].iter().sum::<u64>(), "{reader:?}");
        }
    }
}
