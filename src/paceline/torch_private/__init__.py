"""All that Paceline uses of torch's private parts, one file a subject.

torch may change a private name in any release, and says nothing of it. Other folders therefore call
what stands here, and no private name of torch is outside of this folder:
`tests/house/test_torch_private.py` holds the sources to that. Each file lists the names that it
uses, the versions of torch that it was tested with, and what to do when torch changes them;
`tests/torch_private/` fails when one of them means something else.

Private is a name with a leading underscore on the way to it: of a module (`torch._dynamo`), in a
module (`torch.utils._pytree`), or of an object (`Tensor._version`). Two kinds are not:

- Operators, such as `aten._softmax` and `torch._foreach_mul_`. torch keeps their schemas compatible
  (test/forward_backward_compatibility in its repository), a mode sees them for any model, and an
  operator that is gone is an AttributeError when a module here is imported.
- Names of Python itself, such as `_fields` of named tuples.
"""
