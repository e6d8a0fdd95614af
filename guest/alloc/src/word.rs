//! What the allocator keeps of each frame: one word.

/// No frame: the end of a list.
pub(crate) const NIL: u32 = (1 << LINK_BITS) - 1;

const LINK_BITS: u32 = 28;
const LINK: u64 = NIL as u64;
const ORDER_SHIFT: u32 = 2 * LINK_BITS;
const KIND_SHIFT: u32 = ORDER_SHIFT + 4;

/// What a frame is. Only the first frame of a block says what the block is; the others are [`Inside`](Self::Inside).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Not the first frame of a block, or no memory.
    Inside,
    /// Allocated.
    Used,
    /// Free, and the host has not been told since it was last in use.
    Unreported,
    /// Free, and the host has been told, or has never given anything for it.
    Reported,
    /// Free, and being reported.
    Isolated,
    /// Free, hinted, and kept until the host has done with its hints; `Unreported` before.
    HeldUnreported,
    /// The same; `Reported` before.
    HeldReported,
}

/// A frame's word: links to the next and the previous block of the list that the block is in, order, kind.
///
/// `next` and `prev` are frames, or [`NIL`]; `order <= 10`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word {
    pub(crate) next: u32,
    pub(crate) prev: u32,
    pub(crate) order: u32,
    pub(crate) kind: Kind,
}

impl Word {
    #[inline]
    pub(crate) fn unpack(bits: u64) -> Self {
        #[expect(clippy::cast_possible_truncation, reason = "28 and 4 bits")]
        let field = |shift: u32, mask: u64| ((bits >> shift) & mask) as u32;
        let kind = match bits >> KIND_SHIFT {
            1 => Kind::Used,
            2 => Kind::Unreported,
            3 => Kind::Reported,
            4 => Kind::Isolated,
            5 => Kind::HeldUnreported,
            6 => Kind::HeldReported,
            _ => Kind::Inside,
        };
        Self { next: field(0, LINK), prev: field(LINK_BITS, LINK), order: field(ORDER_SHIFT, 15), kind }
    }

    #[inline]
    pub(crate) fn pack(self) -> u64 {
        let kind: u64 = match self.kind {
            Kind::Inside => 0,
            Kind::Used => 1,
            Kind::Unreported => 2,
            Kind::Reported => 3,
            Kind::Isolated => 4,
            Kind::HeldUnreported => 5,
            Kind::HeldReported => 6,
        };
        u64::from(self.next)
            | u64::from(self.prev) << LINK_BITS
            | u64::from(self.order) << ORDER_SHIFT
            | kind << KIND_SHIFT
    }

    /// A block in no list.
    #[inline]
    pub(crate) fn alone(order: u32, kind: Kind) -> Self {
        Self { next: NIL, prev: NIL, order, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_keep_what_they_are_given() {
        let kinds = [
            Kind::Inside,
            Kind::Used,
            Kind::Unreported,
            Kind::Reported,
            Kind::Isolated,
            Kind::HeldUnreported,
            Kind::HeldReported,
        ];
        for kind in kinds {
            let word = Word { next: NIL, prev: 0x765_4321, order: 10, kind };
            assert_eq!(Word::unpack(word.pack()), word);
            let word = Word { next: 0, prev: NIL, order: 0, kind };
            assert_eq!(Word::unpack(word.pack()), word);
        }
        // Memory as it comes is no block.
        assert_eq!(Word::unpack(0).kind, Kind::Inside);
    }
}
