//! Types that mirror KVM's types field by field.

/// Saved field that mirrors a field of KVM.
pub(crate) trait Field<K>: Sized {
    fn get(kvm: &K) -> Self;
    fn put(&self) -> K;
}

/// Generator of values for tests: every field receives bits from the source.
#[cfg(any(test, feature = "hostile"))]
pub(crate) trait MakeUp {
    fn make_up(bits: &mut dyn FnMut() -> u64) -> Self;
}

macro_rules! plain {
    ($($int:ty),*) => {$(
        impl Field<$int> for $int {
            fn get(kvm: &$int) -> Self {
                *kvm
            }
            fn put(&self) -> $int {
                *self
            }
        }
        #[cfg(any(test, feature = "hostile"))]
        impl MakeUp for $int {
            fn make_up(bits: &mut dyn FnMut() -> u64) -> Self {
                let bytes = bits().to_le_bytes();
                Self::from_le_bytes(*bytes.first_chunk().expect("no integer is wider"))
            }
        }
    )*};
}
plain!(u8, u16, u32, u64, i64);

impl<K, T: Field<K>, const N: usize> Field<[K; N]> for [T; N] {
    fn get(kvm: &[K; N]) -> Self {
        std::array::from_fn(|i| T::get(&kvm[i]))
    }
    fn put(&self) -> [K; N] {
        std::array::from_fn(|i| self[i].put())
    }
}

#[cfg(any(test, feature = "hostile"))]
impl<T: MakeUp, const N: usize> MakeUp for [T; N] {
    fn make_up(bits: &mut dyn FnMut() -> u64) -> Self {
        std::array::from_fn(|_| T::make_up(bits))
    }
}

#[cfg(any(test, feature = "hostile"))]
impl<T: MakeUp> MakeUp for Vec<T> {
    fn make_up(bits: &mut dyn FnMut() -> u64) -> Self {
        (0..bits() % 40).map(|_| T::make_up(bits)).collect()
    }
}

/// Always `None`: an optional field has its own section.
#[cfg(any(test, feature = "hostile"))]
impl<T> MakeUp for Option<T> {
    fn make_up(_: &mut dyn FnMut() -> u64) -> Self {
        None
    }
}

/// Declares a saved type. With `= kvm_type` the type mirrors the named fields of that type. Other
/// fields (padding, reserved fields) are not saved and are zero when loaded.
macro_rules! saved {
    ($(#[$meta:meta])* $name:ident = $kvm:ty { $($(#[$field_meta:meta])* $field:ident: $type:ty),* $(,)? }) => {
        crate::state::mirror::saved! {
            $(#[$meta])*
            #[allow(missing_docs, clippy::allow_attributes, reason = "the fields have the names of KVM's structure")]
            $name { $($(#[$field_meta])* $field: $type),* }
        }

        impl crate::state::mirror::Field<$kvm> for $name {
            fn get(kvm: &$kvm) -> Self {
                Self { $($field: crate::state::mirror::Field::get(&kvm.$field),)* }
            }
            fn put(&self) -> $kvm {
                let mut kvm = <$kvm>::default();
                $(kvm.$field = crate::state::mirror::Field::put(&self.$field);)*
                kvm
            }
        }
    };
    ($(#[$meta:meta])* $name:ident { $($(#[$field_meta:meta])* $field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub struct $name {
            $($(#[$field_meta])* pub $field: $type,)*
        }

        #[cfg(any(test, feature = "hostile"))]
        impl crate::state::mirror::MakeUp for $name {
            fn make_up(bits: &mut dyn FnMut() -> u64) -> Self {
                Self { $($field: crate::state::mirror::MakeUp::make_up(bits),)* }
            }
        }
    };
}
pub(crate) use saved;
