//! State that the allocator keeps for each frame: one word.

/// Link value for no frame: the end of a list.
pub(crate) const NIL: u32 = (1 << LINK_BITS) - 1;

const LINK_BITS: u32 = 28;
const LINK: u64 = NIL as u64;
const ORDER_SHIFT: u32 = 2 * LINK_BITS;
const KIND_SHIFT: u32 = ORDER_SHIFT + 4;

/// Kind of a frame. Only the first frame of a block has the block's kind; the others are
/// [`Inside`](Self::Inside).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// The frame is not the first of a block, or is not memory.
    Inside,
    /// The block is allocated.
    Used,
    /// The block is free, and was not reported since it was last in use.
    Unreported,
    /// The block is free, and was reported or never backed by the host.
    Reported,
    /// The block is free and being reported.
    Isolated,
    /// The block is free, hinted, and kept until the host is done with its hints. It was
    /// `Unreported` before.
    HeldUnreported,
    /// The block is hinted and kept in the same way. It was `Reported` before.
    HeldReported,
}

/// Word of a frame: links to the next and the previous block of the block's list, the order, and
/// the kind.
///
/// Invariants: `next` and `prev` are frames, or [`NIL`]; `order <= 10`.
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

    /// Returns the word of a block that is in no list.
    #[inline]
    pub(crate) fn alone(order: u32, kind: Kind) -> Self {
        Self { next: NIL, prev: NIL, order, kind }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_packing() {
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
        // Zeroed memory contains no block.
        assert_eq!(Word::unpack(0).kind, Kind::Inside);
    }
}
